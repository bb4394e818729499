"""Skips in a row are counted, whenever they are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import RunError
from forge.resilience import SkipLimit


@given(flags=st.lists(st.booleans(), max_size=40), limit=st.integers(1, 5), interval=st.integers(1, 7))
def test_the_run_stops_when_more_than_the_limit_are_skipped_in_a_row(flags, limit, interval):
    longest = max((len(run) for run in "".join("x" if f else " " for f in flags).split()), default=0)
    skips, stopped = SkipLimit(limit, interval), False
    try:
        for flag in flags + [False] * interval:
            skips.note(torch.tensor(flag))
    except RunError:
        stopped = True
    assert stopped == (longest > limit)


def test_the_message_says_how_many_and_what_to_do():
    skips = SkipLimit(1, 1)
    skips.note(torch.tensor(True))
    with pytest.raises(RunError, match=r"2 updates in a row were skipped.*lower"):
        skips.note(torch.tensor(True))
