"""Saving a run: at once or in the background, with what else a checkpoint notes, making room afterwards."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.checkpoint import AsyncSaver, checkpoint_step, prune_checkpoints, save_checkpoint
from forge.config import JobConfig
from forge.errors import CheckpointError
from forge.logging import get_logger
from forge.metrics import MetricsTracker
from forge.training.data_pipeline import Feed
from forge.training.runtime import Runtime
from forge.training.state import TrainState

log = get_logger(__name__)


@contextmanager
def background_saver() -> Generator[AsyncSaver, None, None]:
    """An `AsyncSaver` whose last failure, which nobody waited for, is a warning like those before it."""
    saver = AsyncSaver()
    try:
        yield saver
    finally:
        with _failure_as_warning():
            saver.close()


@contextmanager
def _failure_as_warning() -> Generator[None, None, None]:
    try:
        yield
    except CheckpointError as error:
        log.warning("%s; the checkpoints before it are kept", error)


def build_save(
    config: JobConfig,
    runtime: Runtime,
    tracker: MetricsTracker,
    fixed_notes: dict[str, Any],
    feed: Feed,
    saver: AsyncSaver | None,
) -> Callable[[TrainState, bool, bool], Path]:
    """`save(state, final, prune)`: write a checkpoint, wait for it where it is the last, remove old ones where asked.

    Args:
        fixed_notes: go into every checkpoint, beside the smoothed loss and the position of a stream.
        saver: writes in the background; None = the caller waits for every checkpoint.
    """
    root = Path(config.run_dir) / "checkpoints"

    def notes() -> dict[str, Any]:
        where = {} if feed.position is None else {"stream": feed.position}
        return {"loss_ema": list(tracker.ema_state()), **fixed_notes, **where}

    def remove_old(saved: Path) -> None:
        if runtime.leads:
            kept, is_milestone = config.checkpoint.keep_last_n, config.checkpoint.is_milestone
            prune_checkpoints(root, kept, is_milestone, up_to=checkpoint_step(saved))

    def save(state: TrainState, final: bool, prune: bool) -> Path:
        then = remove_old if prune else lambda _: None
        if saver is None:
            path = save_checkpoint(root, state, config=config, notes=notes())
            then(path)
            return path
        if final:
            with _failure_as_warning():  # of the save before, not of the last one
                saver.wait()
        path = saver.save(root, state, config=config, notes=notes(), then=then)
        if final:
            saver.wait()
        return path

    return save
