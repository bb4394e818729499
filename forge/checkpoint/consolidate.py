"""A checkpoint of many files -> the two files of one process, which any safetensors reader understands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from forge.checkpoint.layout import PARAMS, REST, Layout, file_name, key_in_file
from forge.checkpoint.load import empty_leaf, read_layout, read_parts, verify_checkpoint
from forge.checkpoint.save import CONFIG, describe_file, publish, write_tensors
from forge.errors import CheckpointError


def consolidate(path: Path, out: Path) -> Path:
    """Merge a sharded checkpoint into the form that one process writes, in one process.

    The host's memory must hold the larger of the two files.

    Args:
        out: a folder that does not exist yet; named like a checkpoint (`step_00000012`) it can be resumed from.

    Raises:
        CheckpointError: the checkpoint is damaged, `out` exists, or cannot be written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already: choose another folder, or remove it")
    manifest, layout = verify_checkpoint(path), read_layout(path)
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        files = {name: _merge(path, layout, aside / name) for name in (PARAMS, REST)}
        shutil.copyfile(path / CONFIG, aside / CONFIG)
        files[CONFIG] = describe_file(aside / CONFIG)
        publish(aside, out, step=manifest["step"], tokens=manifest["tokens"], files=files, notes=manifest["notes"])
    except OSError as error:
        raise CheckpointError(f"{out}: the checkpoint cannot be written: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _merge(path: Path, layout: Layout, file: Path) -> dict[str, Any]:
    """Write the leaves that belong into one of the two files, and describe it."""
    leaves = {name: empty_leaf(path, layout, name) for name in layout if file_name(name, 0, 1) == file.name}
    tensors = read_parts(path, layout, leaves, "cpu")
    return write_tensors(file, {key_in_file(name): tensor for name, tensor in tensors.items()})
