"""TrainState -> a folder of safetensors and a manifest.

Each rank writes the parts that it owns to files of its own; `layout.json` says where every part lies. One process alone
writes two files whose own headers say as much.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import save_file
from torch import Tensor

import forge
from forge.checkpoint.folder import checkpoint_path, install_checkpoint
from forge.checkpoint.layout import (
    PARAMS,
    REST,
    Layout,
    Part,
    assign,
    file_name,
    key_in_file,
    layout_to_json,
    part_of,
)
from forge.checkpoint.ranks import Ranks, all_ranks
from forge.config import JobConfig, save_config
from forge.distributed.shards import local_data
from forge.errors import CheckpointError
from forge.files import file_digest, sync_file, sync_folder
from forge.pytree import tree_flatten_named
from forge.training.state import TrainState

FORMAT = 2
MANIFEST = "manifest.json"
CONFIG = "config.toml"
LAYOUT = "layout.json"
SEAL = "sha256"
"""Key of the manifest's digest of itself."""

Files = dict[str, dict[str, Any]]
"""Name -> bytes and sha256."""


@frozen
class Draft:
    """A checkpoint that is not on disk yet, as one rank sees it."""

    final: Path
    step: int
    tokens: int
    config: JobConfig
    notes: Mapping[str, Any]
    own: dict[str, Tensor]  # the parts that this rank writes, by leaf
    layout: Layout  # of the whole; empty on other ranks than 0

    @property
    def aside(self) -> Path:
        """Where it is written before it is complete."""
        return self.final.with_name(f".{self.final.name}.writing")


def save_checkpoint(
    root: Path, state: TrainState, *, config: JobConfig, notes: Mapping[str, Any] | None = None
) -> Path:
    """Write `root/step_…` aside, bring it to disk, and rename it: it is complete or not there.

    `params.safetensors` holds the parameters under their fully-qualified names, readable by any safetensors reader;
    `state.safetensors` everything else; `manifest.json` sizes and SHA-256 of both. In a job of several processes every
    rank calls this; each writes what it owns, to `params.00003.safetensors` and `state.00003.safetensors`.

    Args:
        root: a folder that all ranks share.
        notes: JSON values to get back on load.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written, on any rank; what was written is removed.
    """
    ranks = all_ranks()
    return write_draft(draft_checkpoint(root, state, config=config, notes=notes, ranks=ranks), ranks)


def draft_checkpoint(
    root: Path, state: TrainState, *, config: JobConfig, notes: Mapping[str, Any] | None, ranks: Ranks
) -> Draft:
    """Agree on who writes what, and make the folder; the parts still are those of the state. Collective."""
    leaves = tree_flatten_named(state)
    final, step, tokens = checkpoint_path(root, int(state.step)), int(state.step), int(state.tokens)

    layout: Layout = {}  # stays on rank 0: every answer is padded to the largest

    def plan(held: list[dict[str, Part]]) -> list[list[str]]:
        found, owned = assign(held)
        layout.update(found)
        return owned

    held = ranks.together(lambda: {name: part_of(name, leaf) for name, leaf in leaves.items()})
    names = ranks.agree(held, plan)
    own = {name: local_data(leaves[name]) for name in names}
    draft = Draft(final, step, tokens, config, notes or {}, own, layout)
    ranks.together(lambda: _make_folder(draft) if ranks.rank == 0 else None)
    return draft


def write_draft(draft: Draft, ranks: Ranks) -> Path:
    """Write every rank's files, then the manifest, and give the folder its name. Collective."""

    def merged(found: list[Files]) -> list[Files]:
        everything = {name: entry for files in found for name, entry in files.items()}
        return [everything if rank == 0 else {} for rank in range(ranks.size)]

    try:
        own = ranks.together(lambda: _write_own(draft, ranks))
        files = ranks.agree(own, merged)
        ranks.together(lambda: _complete(draft, files, ranks) if ranks.rank == 0 else None)
    except Exception:
        if ranks.rank == 0:
            shutil.rmtree(draft.aside, ignore_errors=True)
        raise
    return draft.final


def _make_folder(draft: Draft) -> None:
    with writing(draft.final):
        draft.final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft.aside, ignore_errors=True)
        draft.aside.mkdir()


def _write_own(draft: Draft, ranks: Ranks) -> Files:
    """This rank's files; one process alone writes both, be they empty."""
    names = [PARAMS, REST] if ranks.size == 1 else []
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for leaf, part in draft.own.items():
        tensors.setdefault(file_name(leaf, ranks.rank, ranks.size), {})[key_in_file(leaf)] = part
    with writing(draft.final):
        return {name: write_tensors(draft.aside / name, parts) for name, parts in tensors.items()}


def _complete(draft: Draft, files: Files, ranks: Ranks) -> None:
    folder = draft.aside
    with writing(draft.final):
        if ranks.size > 1:
            (folder / LAYOUT).write_text(layout_to_json(draft.layout), encoding="utf-8")
            files = {LAYOUT: describe_file(folder / LAYOUT), **files}
        save_config(draft.config, folder / CONFIG)
        files = {CONFIG: describe_file(folder / CONFIG), **files}
        publish(folder, draft.final, step=draft.step, tokens=draft.tokens, files=files, notes=draft.notes)


def publish(folder: Path, final: Path, *, step: int, tokens: int, files: Files, notes: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose other files are there, bring all to disk, and rename it to `final`."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "tokens": tokens,
        "forge": forge.__version__,
        "torch": torch.__version__,
        "files": dict(sorted(files.items())),
        "notes": dict(notes),
    }
    write_manifest(folder, manifest)
    for name in files.keys() & {CONFIG, LAYOUT} | {MANIFEST}:
        sync_file(folder / name)
    sync_folder(folder)
    install_checkpoint(folder, final)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with its own SHA-256: a step or a note that was changed since is found too."""
    sealed = {**manifest, SEAL: manifest_digest(manifest)}
    (folder / MANIFEST).write_text(json.dumps(sealed, indent=1, allow_nan=False), encoding="utf-8")


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of all that a manifest says but for the digest itself, however it is laid out."""
    said = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file, bring it to disk, and describe it."""
    save_file(_storable(tensors), path, metadata={"format": "pt"})
    sync_file(path)
    return describe_file(path)


def describe_file(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


@contextmanager
def writing(final: Path) -> Generator[None, None, None]:
    """What the disk refuses is an error of the checkpoint's."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or "I/O error" in str(error) or "os error" in str(error):
            raise CheckpointError(f"{final}: the checkpoint cannot be written: {error}") from None
        raise


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
