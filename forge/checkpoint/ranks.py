"""The ranks that write or read one checkpoint together: they succeed together or fail together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from attrs import frozen

from forge.errors import CheckpointError, ForgeError

T = TypeVar("T")
R = TypeVar("R")


@frozen
class _Failure:
    """What every rank raises instead of going on."""

    message: str


@frozen
class Ranks:
    """All ranks of the job, seen from one of them; alone, nothing is exchanged."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: the default one

    def agree(self, value: T, decide: Callable[[list[T]], Sequence[R]]) -> R:
        """Rank 0 decides over the values of all ranks and gives each its answer; collective.

        Raises:
            CheckpointError: `decide` failed; on every rank.
        """
        if self.size == 1:
            return decide([value])[0]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        cause: Exception | None = None
        answers: list[Any] | None = None
        if values is not None:
            try:
                answers = list(decide(values))
            except Exception as error:
                cause, answers = error, [_Failure(_message(error))] * self.size
        received: list[Any] = [None]
        dist.scatter_object_list(received, answers, src=0, group=self.group)
        if isinstance(received[0], _Failure):
            raise CheckpointError(received[0].message) from cause
        return received[0]

    def together(self, work: Callable[[], T]) -> T:
        """`work()` on every rank, and its own result on each; collective.

        Raises:
            CheckpointError: it failed on some rank, which the message names; on every rank.
        """
        if self.size == 1:
            return work()
        cause: Exception | None = None
        try:
            value = work()
        except Exception as error:
            cause = error
        try:
            self.agree(None if cause is None else _message(cause), _refuse_failures)
        except CheckpointError as error:
            raise error from cause
        return value


def all_ranks(group: dist.ProcessGroup | None = None) -> Ranks:
    """The ranks of this job; one, where there is no process group.

    Args:
        group: of all ranks, to exchange messages over; None = the default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), group)


def _refuse_failures(messages: list[str | None]) -> list[None]:
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank, message = failed[0]
        more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank}: {message}{more}")
    return [None] * len(messages)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
