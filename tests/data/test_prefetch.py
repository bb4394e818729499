"""Batches made in the background are the ones made in the foreground, and no thread stays behind."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import Batch, prefetch


def _batch_at(step: int) -> Batch:
    ids = torch.full((1, 1, 2), step)
    return Batch(ids, ids + 1)


def _steps(batches) -> list[int]:
    return [int(batch.input_ids[0, 0, 0]) for batch in batches]


def _workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forge-prefetch")]


@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 5), count=st.integers(0, 12), depth=st.integers(0, 15), workers=st.integers(1, 4))
def test_any_depth_and_workers_give_the_same_batches_in_order_and_leave_no_thread(start, count, depth, workers):
    assert _steps(prefetch(_batch_at, start, start + count, depth, workers)) == list(range(start, start + count))
    assert _workers() == []


@pytest.mark.parametrize("workers", [1, 4])
def test_a_slow_batch_does_not_let_a_later_one_pass(workers):
    def uneven(step):
        time.sleep(0.02 if step % 3 == 0 else 0)
        return _batch_at(step)

    assert _steps(prefetch(uneven, 0, 9, 4, workers)) == list(range(9))


def test_the_given_depth_is_made_ahead_and_no_more():
    made, ahead = [], threading.Event()

    def counted(step):
        made.append(step)
        if step == 3:
            ahead.set()
        return _batch_at(step)

    with closing(prefetch(counted, 0, 100, 3)) as batches:
        next(batches)
        assert ahead.wait(5)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


@pytest.mark.parametrize(("depth", "workers"), [(0, 1), (1, 1), (3, 1), (6, 3)])
def test_an_error_is_raised_at_the_batch_it_belongs_to_and_ends_the_threads(depth, workers):
    def failing(step):
        if step == 2:
            raise ValueError("step 2 is broken")
        return _batch_at(step)

    batches = prefetch(failing, 0, 10, depth, workers)
    assert _steps([next(batches), next(batches)]) == [0, 1]
    with pytest.raises(ValueError, match="step 2 is broken") as caught:
        next(batches)
    assert caught.value.__notes__ == ["while batch 2 was made"]
    assert _workers() == []


def test_closing_early_stops_at_the_batch_in_the_making():
    made = []

    def slow(step):
        made.append(step)
        time.sleep(0.05)
        return _batch_at(step)

    with closing(prefetch(slow, 0, 1000, 100)) as batches:
        next(batches)
    assert len(made) <= 3 and _workers() == []


def test_letting_go_of_the_batches_ends_the_thread():
    batches = prefetch(_batch_at, 0, 1000, 2)
    next(batches)
    assert len(_workers()) == 1
    del batches
    gc.collect()
    assert _workers() == []


def test_depth_0_makes_each_batch_when_it_is_asked_for_on_the_same_thread():
    seen = []

    def here(step):
        seen.append((step, threading.current_thread()))
        return _batch_at(step)

    batches = prefetch(here, 5, 8, 0)
    assert seen == []
    next(batches)
    assert seen == [(5, threading.current_thread())]
