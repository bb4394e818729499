"""Time that is left out is left out once."""

from __future__ import annotations

import pytest

from forge.metrics.stopwatch import Stopwatch


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_excluded_time_is_left_out_and_reported_by_name(clock):
    watch = Stopwatch(clock, lambda: None)
    clock.pass_(1)
    for seconds in (2, 3):
        with watch.excluded("eval"):
            clock.pass_(seconds)
    with watch.excluded("checkpoint"):
        clock.pass_(7)
    assert watch.seconds() == 1
    assert watch.take_apart() == {"eval": 5, "checkpoint": 7}
    assert watch.take_apart() == {}


def test_a_block_within_an_excluded_block_counts_once(clock):
    watch = Stopwatch(clock, lambda: None)
    with watch.excluded("eval"):
        clock.pass_(2)
        with watch.excluded("checkpoint"):
            clock.pass_(3)
    assert watch.seconds() == 0
    assert watch.take_apart() == {"eval": 5}


def test_what_fails_inside_is_still_left_out(clock):
    watch = Stopwatch(clock, lambda: None)
    with pytest.raises(ValueError), watch.excluded("eval"):
        clock.pass_(2)
        raise ValueError
    assert watch.seconds() == 0
    with watch.excluded("eval"):
        clock.pass_(1)
    assert watch.take_apart() == {"eval": 3}


def test_queued_work_is_timed_where_it_was_asked_for(clock):
    queued = [4.0]  # seconds of kernels that training launched and nobody waited for

    def wait() -> None:
        clock.pass_(sum(queued))
        queued.clear()

    watch = Stopwatch(clock, wait)
    with watch.excluded("eval"):
        queued.append(1.0)
    assert watch.seconds() == 4
    assert watch.take_apart() == {"eval": 1}


def test_a_restart_counts_from_then(clock):
    watch = Stopwatch(clock, lambda: None)
    clock.pass_(5)
    watch.restart()
    clock.pass_(2)
    assert watch.seconds() == 2
