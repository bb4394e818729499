"""A `TrainState` on disk and back: written aside and renamed, checked on load, never a pickle."""

from forge.checkpoint.background import AsyncSaver
from forge.checkpoint.compat import check_resumable
from forge.checkpoint.consolidate import consolidate
from forge.checkpoint.diff import DIFF_HEADER, TensorDiff, diff_checkpoints, format_diff
from forge.checkpoint.folder import (
    checkpoint_path,
    checkpoint_step,
    list_checkpoints,
    prune_checkpoints,
    remove_leftovers,
    remove_newer,
)
from forge.checkpoint.load import has_parameters_only, latest_sound, load_checkpoint, read_manifest, verify_checkpoint
from forge.checkpoint.save import save_checkpoint

__all__ = [
    "DIFF_HEADER", "AsyncSaver", "TensorDiff", "check_resumable", "checkpoint_path", "checkpoint_step", "consolidate",
    "diff_checkpoints", "format_diff", "has_parameters_only", "latest_sound", "list_checkpoints", "load_checkpoint",
    "prune_checkpoints", "read_manifest", "remove_leftovers", "remove_newer", "save_checkpoint", "verify_checkpoint",
]  # fmt: skip
