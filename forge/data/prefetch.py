"""Batches made ahead in the background, always in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from forge.data.batch import Batch


def prefetch(batch_at: Callable[[int], Batch], start: int, stop: int, depth: int) -> Generator[Batch, None, None]:
    """Yield `batch_at(start)` .. `batch_at(stop - 1)`, up to `depth` of them made ahead by a background thread.

    An exception of `batch_at` is raised at the batch it belongs to. `close()` (or `contextlib.closing`, or letting go
    of the generator) ends the thread, after the batch in the making.

    Args:
        depth: batches kept ready; 0 makes each where it is asked for, without a thread.
    """
    if depth == 0:
        yield from map(batch_at, range(start, stop))
        return
    steps = iter(range(start, stop))
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forge-prefetch")
    try:
        pending = deque(pool.submit(batch_at, step) for step in islice(steps, depth))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(batch_at, step) for step in islice(steps, 1))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
