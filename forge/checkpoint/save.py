"""TrainState -> a folder of safetensors and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import forge
from forge.checkpoint.folder import checkpoint_path, remove_checkpoint, sync_folder
from forge.config import JobConfig, save_config
from forge.errors import CheckpointError
from forge.pytree import tree_flatten_named
from forge.training.state import TrainState

FORMAT = 1
MANIFEST = "manifest.json"
CONFIG = "config.toml"
PARAMS = "params.safetensors"
REST = "state.safetensors"
PARAMS_PREFIX = "params/"


def save_checkpoint(
    root: Path, state: TrainState, *, config: JobConfig, notes: Mapping[str, Any] | None = None
) -> Path:
    """Write `root/step_…` aside, bring it to disk, and rename it: it is complete or not there.

    `params.safetensors` holds the parameters under their fully-qualified names, readable by any safetensors reader;
    `state.safetensors` everything else; `manifest.json` sizes and SHA-256 of both.

    Args:
        notes: JSON values to get back on load.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; what was written is removed.
    """
    final = checkpoint_path(root, int(state.step))
    aside = final.with_name(f".{final.name}.writing")
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write(aside, state, config, notes or {})
        if final.exists():
            remove_checkpoint(final)
        aside.rename(final)
        sync_folder(root)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) or "I/O error" in str(error) or "os error" in str(error):
            raise CheckpointError(f"{final}: the checkpoint cannot be written: {error}") from None
        raise
    return final


def _write(folder: Path, state: TrainState, config: JobConfig, notes: Mapping[str, Any]) -> None:
    leaves = tree_flatten_named(state)
    params = {k.removeprefix(PARAMS_PREFIX): v for k, v in leaves.items() if k.startswith(PARAMS_PREFIX)}
    rest = {name: leaf for name, leaf in leaves.items() if not name.startswith(PARAMS_PREFIX)}
    save_config(config, folder / CONFIG)
    save_file(_storable(params), folder / PARAMS, metadata={"format": "pt"})
    save_file(_storable(rest), folder / REST, metadata={"format": "pt"})
    manifest = {
        "format": FORMAT,
        "step": int(state.step),
        "tokens": int(state.tokens),
        "forge": forge.__version__,
        "torch": torch.__version__,
        "files": {name: describe_file(folder / name) for name in (CONFIG, PARAMS, REST)},
        "notes": dict(notes),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous and without shared storage, as safetensors demands."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found
