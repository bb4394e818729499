"""A function over a row of items by several processes, in order."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from forge.errors import DataError, ForgeError

Item = TypeVar("Item")
Result = TypeVar("Result")
_Worker = tuple[Any, Connection]
"""A process and our end of the connection to it."""


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """`map(function, items)`, by processes of their own: the same results in the same order.

    At most 2 * workers items and results wait. What reading the items raises comes after the results before it.

    Args:
        function: it, the items and the results must be picklable.
        workers: processes; 1 = none but this one.

    Raises:
        DataError: a process died.
    """
    if workers == 1:
        yield from map(function, items)
        return
    with _processes(function, workers) as call, ThreadPoolExecutor(workers) as threads:
        pending: deque[Future[Result]] = deque()
        try:
            for item in _with_its_error(items):
                pending.append(threads.submit(call, item))
                if len(pending) >= 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _with_its_error(items: Iterable[Item]) -> Generator[Item | ForgeError, None, None]:
    """The items, and the error that reading them ends with as the last one."""
    try:
        yield from items
    except ForgeError as error:
        yield error


@contextmanager
def _processes(function: Callable[[Item], Result], count: int) -> Iterator[Callable[[Item | ForgeError], Result]]:
    """`call(item)`, which any thread may use: it takes a process that is free.

    Processes are started afresh, not forked: this one may have threads and a CUDA context. One whose parent is gone
    finds its connection closed, and ends.
    """
    context, free = multiprocessing.get_context("spawn"), queue.SimpleQueue[_Worker]()
    started = list[_Worker]()

    def call(item: Item | ForgeError) -> Result:
        if isinstance(item, ForgeError):
            raise item
        worker = free.get()
        try:
            return _ask(worker, item)
        finally:
            free.put(worker)

    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
            free.put((process, ours))
        yield call
    finally:
        for process, connection in started:
            process.terminate()
            process.join()
            connection.close()


def _ask(worker: _Worker, item: Any) -> Any:
    """What a process answers."""
    process, connection = worker
    try:
        connection.send(item)
        good, result = connection.recv()
    except (EOFError, OSError) as error:
        process.join(1)
        raise DataError(
            f"a worker process died (exit status {process.exitcode}): out of memory? use fewer --workers"
        ) from error
    if not good:
        raise result
    return result


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    """Answer items with (True, result) or (False, exception) until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            item = connection.recv()
            try:
                answer = (True, function(item))
            except Exception as error:
                if not isinstance(error, ForgeError):
                    error.add_note(traceback.format_exc())
                answer = (False, error)
            connection.send(answer)
