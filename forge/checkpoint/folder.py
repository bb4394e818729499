"""The folder of a run's checkpoints: names, order, what is kept.

A checkpoint is a folder `step_00000012`, complete from the moment it has that name. While it is being written, and
while it is being removed, its name starts with a dot.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from forge.files import sync_folder
from forge.logging import get_logger

log = get_logger(__name__)

_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_path(root: Path, step: int) -> Path:
    """Folder of the checkpoint taken after `step` batches."""
    return root / f"step_{step:08d}"


def checkpoint_step(path: Path) -> int:
    """Inverse of `checkpoint_path`."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint (step_00000012)")
    return int(match[1])


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints, oldest first; empty where there is no such folder."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=checkpoint_step)


def prune_checkpoints(
    root: Path, keep_last_n: int, is_milestone: Callable[[int], bool] = lambda step: False, *, up_to: int | None = None
) -> list[Path]:
    """Remove all but the newest `keep_last_n` and the milestones; one that cannot be removed is a warning.

    Args:
        is_milestone: step -> whether its checkpoint stays.
        up_to: leave those of later steps out of account: a run that has passed over them found them damaged.

    Returns:
        What was removed.
    """
    counted = [path for path in list_checkpoints(root) if up_to is None or checkpoint_step(path) <= up_to]
    removed = []
    for path in [path for path in counted[: -max(1, keep_last_n)] if not is_milestone(checkpoint_step(path))]:
        try:
            remove_checkpoint(path)
        except OSError as error:
            log.warning("%s: the old checkpoint cannot be removed (%s); training goes on", path, error.strerror)
        else:
            removed.append(path)
    return removed


def remove_newer(root: Path, step: int) -> None:
    """Remove the checkpoints of later steps than this one: a run that went back to it makes those steps again."""
    for path in list_checkpoints(root):
        if checkpoint_step(path) > step:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is never taken for a complete one."""
    shutil.rmtree(_put_aside(path), ignore_errors=True)


def install_checkpoint(folder: Path, final: Path) -> None:
    """Give a complete folder on disk its name; what had it before is removed only then."""
    old = _put_aside(final) if final.exists() else None
    folder.rename(final)
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _put_aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def remove_leftovers(root: Path) -> None:
    """Remove what a killed process left half written or half removed. Only while no other process writes here."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith(".step_"):
                shutil.rmtree(path, ignore_errors=True)
