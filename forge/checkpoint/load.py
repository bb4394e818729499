"""A folder of safetensors and a manifest -> TrainState. What is damaged is found and named before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge.checkpoint.folder import list_checkpoints
from forge.checkpoint.save import FORMAT, MANIFEST, PARAMS, PARAMS_PREFIX, REST, describe_file
from forge.errors import CheckpointError
from forge.logging import get_logger
from forge.pytree import tree_flatten_named, tree_unflatten_named
from forge.training.state import TrainState

log = get_logger(__name__)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not one of ours.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from None
    if not isinstance(manifest, dict) or not {"format", "step", "files", "notes"} <= manifest.keys():
        raise CheckpointError(f"{file}: damaged: not a checkpoint's manifest")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{file}: format {manifest['format']}; this version of forge reads format {FORMAT}")
    return manifest


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check the size and SHA-256 of every file against the manifest, which is returned.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing from the checkpoint")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"{file}: damaged: {file.stat().st_size} bytes, {expected['bytes']} were written")
        if describe_file(file) != expected:
            raise CheckpointError(f"{file}: damaged: its SHA-256 is not that of what was written")
    return manifest


def latest_sound(root: Path) -> Path | None:
    """The newest checkpoint whose files are all intact; damaged ones are named in a warning and passed over."""
    for path in reversed(list_checkpoints(root)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s; trying the checkpoint before it", error)
            continue
        return path
    return None


def load_checkpoint(path: Path, template: TrainState, *, device: torch.device | str = "cpu") -> TrainState:
    """Read a state back, bit for bit.

    Args:
        template: a state of the same structure, shapes and dtypes; on the meta device it costs no memory.

    Raises:
        CheckpointError: damage, or another shape of model or optimizer; the message names what differs.
    """
    expected = tree_flatten_named(template)
    found = {PARAMS_PREFIX + name: tensor for name, tensor in _read(path / PARAMS, device).items()}
    found |= _read(path / REST, device)
    _check_same(path, expected, found)
    return tree_unflatten_named(template, found)


def _read(file: Path, device: torch.device | str) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device=str(device)) as reader:
            # Copied out of the mapped file: aligned as fresh tensors are, and safe when the file goes.
            return {name: reader.get_tensor(name).clone() for name in reader.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing from the checkpoint") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None


def _check_same(path: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    def describe(tensor: Tensor) -> str:
        return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    differences = [f"{name} is missing" for name in expected if name not in found]
    differences += [f"{name} is not expected" for name in found if name not in expected]
    differences += [
        f"{name} is {describe(found[name])}, expected {describe(tensor)}"
        for name, tensor in expected.items()
        if name in found and describe(found[name]) != describe(tensor)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"{path}: the checkpoint is of another model or optimizer: {'; '.join(differences[:3])}{more}"
        )
