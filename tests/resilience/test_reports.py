"""From what ranks say of themselves follows which of them to blame."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.resilience.reports import Failure, Report, Still, held_up_by, judge, name_ranks, read_as, written

BUSY = Report(tick=9, beats=40, doing="in step 5", idle=0.5, place="", who="host, process 7")
WAITS = evolve(BUSY, idle=11.0, place="loop.py:3 in step", collective=True)
SLEEPS = evolve(BUSY, idle=12.0, place="hook.py:9 in on_step_end", doing="in the hooks of step 4")


def _judge(*seen):
    return judge(dict(enumerate(seen)), limit=10, silence=2)


def test_nobody_is_blamed_while_all_go_on():
    assert _judge((BUSY, 0), (evolve(BUSY, beats=41), 1), (BUSY, 9)) is None


def test_the_rank_with_the_fewest_beats_hung_and_its_place_is_told():
    failure = _judge((WAITS, 0), (evolve(SLEEPS, beats=39), 0), (WAITS, 0))
    assert failure.hung == [1]
    assert "rank 1 (host, process 7) hung for 12 s: in the hooks of step 4, at hook.py:9 in on_step_end" in failure.line


def test_of_ranks_at_one_beat_those_that_wait_for_others_did_not_hang():
    assert _judge((WAITS, 0), (WAITS, 0), (SLEEPS, 0)).hung == [2]
    assert _judge((WAITS, 0), (WAITS, 0)).hung == [0, 1]


def test_a_silent_rank_comes_before_all_others():
    assert _judge((WAITS, 0), (evolve(BUSY, beats=50), 3)).hung == [1]
    failure = _judge((BUSY, 0), (BUSY, 11))
    assert failure.hung == [1] and "no sign of life for 11 s" in failure.line


def test_a_rank_is_named_when_its_place_is_known():
    assert _judge((WAITS, 0), (evolve(BUSY, beats=39, idle=9.9), 0)) is None


def test_many_ranks_are_named_in_short():
    assert (
        name_ranks(range(20), "host, process 7")
        == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more (the first: host, process 7)"
    )


@settings(deadline=None)
@given(beats=st.lists(st.integers(0, 3), min_size=1, max_size=6), waits=st.data())
def test_somebody_is_always_held_up_by_somebody_with_the_fewest_beats(beats, waits):
    reports = {n: evolve(BUSY, beats=b, collective=waits.draw(st.booleans())) for n, b in enumerate(beats)}
    blamed = held_up_by(reports)
    assert blamed and all(beats[rank] == min(beats) for rank in blamed)


@given(values=st.lists(st.integers(0, 1), max_size=20))
def test_stillness_is_the_time_since_the_last_change(values):
    still, expected, before = Still(), 0.0, None
    for value in values:
        expected = expected + 0.5 if value == before else 0.0
        before = value
        assert still.see(value, 0.5) == expected


def test_what_is_written_is_read():
    assert read_as(Report, written(SLEEPS).encode()) == SLEEPS
    failure = Failure("rank 1 failed", 2, [1])
    assert read_as(Failure, written(failure).encode()) == failure
