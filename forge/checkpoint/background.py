"""Saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from forge.checkpoint.ranks import all_ranks
from forge.checkpoint.save import Draft, draft_checkpoint, write_draft
from forge.config import JobConfig
from forge.training.state import TrainState


class AsyncSaver:
    """Copies a state to host memory, and writes the copy in a thread.

    One save at a time: the next waits for the one before. Made, used and closed by every rank of the job alike.
    """

    def __init__(self) -> None:
        # The thread's messages must not come between those of the training step: a group of their own.
        distributed = dist.is_available() and dist.is_initialized()
        self._ranks = all_ranks(dist.new_group(backend="gloo") if distributed else None)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self,
        root: Path,
        state: TrainState,
        *,
        config: JobConfig,
        notes: Mapping[str, Any] | None = None,
        then: Callable[[Path], object] = lambda _: None,
    ) -> Path:
        """`save_checkpoint` whose writing is not waited for; the state may be overwritten once this returns.

        Args:
            then: called in the thread of rank 0 with the complete checkpoint, to remove old ones.

        Returns:
            Where the checkpoint will be.

        Raises:
            CheckpointError: the save before this one failed; this one was started all the same.
        """
        failure = self._settle()
        draft = draft_checkpoint(root, state, config=config, notes=notes, ranks=self._ranks)
        self._pending = self._pool.submit(self._write, evolve(draft, own=_on_host(draft.own)), then)
        if failure is not None:
            raise failure
        return draft.final

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed.
        """
        failure = self._settle()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(self, draft: Draft, then: Callable[[Path], object]) -> Path:
        path = write_draft(draft, self._ranks)
        self._ranks.together(lambda: then(path) if self._ranks.rank == 0 else None)
        return path

    def _settle(self) -> BaseException | None:
        pending, self._pending = self._pending, None
        return None if pending is None else pending.exception()


def _on_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that stay as they are; training waits for them, so those of CUDA go to pinned memory, all at once.

    torch keeps pinned memory that is free again for the next save.
    """
    copies = {name: torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda) for name, p in parts.items()}
    for name, part in parts.items():
        copies[name].copy_(part, non_blocking=True)
    if any(part.is_cuda for part in parts.values()):
        torch.cuda.current_stream().synchronize()
    return copies
