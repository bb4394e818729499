"""Several processes give what one gives, in its order, and a failure of theirs is one of the caller's."""

from __future__ import annotations

import os
import signal

import pytest

from forge.data.workers import available_cores, map_in_order
from forge.errors import DataError


def _twice(item: int) -> int:
    if item == -1:
        raise DataError("minus one")
    if item == -2:
        raise ZeroDivisionError("a bug")
    if item == -3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def _broken_after(n: int):
    yield from range(n)
    raise DataError("the source is damaged")


def test_one_worker_is_this_process():
    assert list(map_in_order(lambda item: (item, os.getpid()), [1, 2], 1)) == [(1, os.getpid()), (2, os.getpid())]
    assert available_cores() >= 1


@pytest.mark.slow
def test_several_processes_are_one_map_with_one_error():
    assert list(map_in_order(_twice, range(25), 3)) == [2 * item for item in range(25)]
    results = map_in_order(_twice, [1, 2, -1, 3], 2)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(DataError, match="minus one"):
        next(results)
    results = map_in_order(_twice, _broken_after(9), 2)
    assert [next(results) for _ in range(9)] == [2 * item for item in range(9)]
    with pytest.raises(DataError, match="the source is damaged"):
        next(results)


@pytest.mark.slow
def test_a_bug_keeps_its_traceback_and_a_process_that_dies_is_one_line():
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        list(map_in_order(_twice, [1, -2, 3], 2))
    assert "_twice" in "".join(caught.value.__notes__)
    with pytest.raises(DataError, match=r"a worker process died \(exit status -9\)"):
        list(map_in_order(_twice, [1, -3, 3], 2))


@pytest.mark.slow
def test_reading_runs_ahead_no_further_than_there_is_work_and_stops_with_the_caller():
    read = []
    results = map_in_order(_twice, (read.append(i) or i for i in range(1000)), 2)
    next(results)
    assert len(read) <= 4
    results.close()
    assert len(read) <= 4
