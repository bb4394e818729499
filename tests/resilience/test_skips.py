"""Skips in a row are counted, whenever they are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import RunError
from forge.resilience import SkipLimit, TooManySkips


@given(
    flags=st.lists(st.booleans(), max_size=40),
    limit=st.integers(1, 5),
    interval=st.integers(1, 7),
    done=st.integers(0, 9),
)
def test_the_run_stops_when_more_than_the_limit_are_skipped_in_a_row(flags, limit, interval, done):
    text = "".join("x" if flag else " " for flag in flags)
    at = text.find("x" * (limit + 1))
    skips, stopped = SkipLimit(limit, interval, done), None
    try:
        for flag in flags + [False] * interval:
            skips.note(torch.tensor(flag))
    except TooManySkips as error:
        stopped = error
    assert (stopped is not None) == (at >= 0)
    if stopped is not None:
        assert stopped.first == done + at + 1
        assert stopped.first + limit <= stopped.made < stopped.first + limit + interval


def test_the_message_says_how_many_which_and_what_to_do():
    skips = SkipLimit(1, 1, done=4)
    skips.note(torch.tensor(True))
    with pytest.raises(
        RunError, match=r"2 updates in a row were skipped.*updates 5 to 6.*lower.*--train.max-rollbacks"
    ):
        skips.note(torch.tensor(True))
