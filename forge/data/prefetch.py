"""Batches made ahead in the background, always in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def prefetch(
    batch_at: Callable[[int], T], start: int, stop: int, depth: int, workers: int = 1
) -> Generator[T, None, None]:
    """Yield `batch_at(start)` .. `batch_at(stop - 1)`, up to `depth` of them made ahead by background threads.

    They come in order whichever is ready first. An exception of `batch_at` is raised at the batch it belongs to, with
    a note that names it. `close()` (or `contextlib.closing`, or letting go of the generator) ends the threads, after
    the batches in the making.

    Args:
        batch_at: with one worker, called for one batch after the other in order; with more, for several at once.
        depth: batches kept ready; 0 makes each where it is asked for, without a thread.
        workers: threads; for sources that wait (a network, a slow disk): where memory is read, one is faster than two.
    """

    def made(step: int) -> T:
        try:
            return batch_at(step)
        except Exception as error:
            error.add_note(f"while batch {step} was made")
            raise

    if depth == 0:
        yield from map(made, range(start, stop))
        return
    steps = iter(range(start, stop))
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="forge-prefetch")
    try:
        pending = deque(pool.submit(made, step) for step in islice(steps, depth))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(made, step) for step in islice(steps, 1))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
