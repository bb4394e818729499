"""Jumps name each batch once: what was read in a failed attempt is not read again, and order is kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.resilience import batch_index, jump_over


def test_a_run_that_never_rolled_back_reads_the_batch_of_its_step():
    assert [batch_index([], step) for step in range(5)] == [0, 1, 2, 3, 4]


def test_after_a_rollback_the_batches_since_are_jumped_over():
    """10 updates made, the last 3 bad, back to the checkpoint at 6: batches 6 to 9 are never read again."""
    jumps = jump_over([], failed=10, back_to=6)
    assert jumps == [[6, 4]]
    assert [batch_index(jumps, step) for step in range(4, 9)] == [4, 5, 10, 11, 12]


def test_a_second_rollback_to_the_same_checkpoint_goes_farther():
    jumps = jump_over(jump_over([], failed=10, back_to=6), failed=8, back_to=6)
    assert jumps == [[6, 4], [6, 2]]
    assert [batch_index(jumps, step) for step in range(5, 8)] == [5, 12, 13]


def test_a_rollback_behind_an_earlier_one_replaces_it():
    jumps = jump_over([[6, 4]], failed=8, back_to=3)  # had read 0..5, 10, 11
    assert len(jumps) == 2, "the count of rollbacks stays"
    assert [batch_index(jumps, step) for step in range(2, 6)] == [2, 12, 13, 14]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=6))
def test_batches_only_go_forward_whatever_was_rolled_back(history):
    jumps: list[list[int]] = []
    made, newest = 0, -1  # the newest batch that was ever read
    for updates, back in history:
        for step in range(made, made + updates):
            index = batch_index(jumps, step)
            assert index == newest + 1
            newest = index
        failed, made = made + updates, max(0, made + updates - back)
        kept = [batch_index(jumps, step) for step in range(made)]
        jumps = jump_over(jumps, failed=failed, back_to=made)
        assert [batch_index(jumps, step) for step in range(made)] == kept
