"""A curve in bounded memory: no extreme is lost, and a short one is kept whole."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.report import Curve


def _curve(points, limit=1024):
    curve = Curve(limit)
    for step, value in points:
        curve.add(step, value)
    return curve


def test_up_to_the_limit_every_point_is_kept():
    points = [(step, float(-step)) for step in range(0, 1024)]
    assert _curve(points).points() == points


VALUES = st.dictionaries(st.integers(0, 10**6), st.floats(-1e6, 1e6), min_size=1, max_size=300)


@settings(deadline=None)
@given(VALUES, st.integers(1, 40), st.randoms())
def test_any_limit_keeps_the_ends_and_the_extremes_and_only_points_that_were_there(values, limit, rng):
    points = list(values.items())
    rng.shuffle(points)
    curve = _curve(points, limit)
    shown = curve.points()
    assert len(shown) <= 2 * limit and shown == sorted(shown)
    assert set(shown) <= set(points)
    assert min(value for _, value in shown) == min(values.values()) == curve.least[0]
    assert max(value for _, value in shown) == max(values.values()) == curve.largest[0]
    assert curve.first == (values[min(values)], min(values)) and curve.last == (values[max(values)], max(values))
    assert curve.count == len(values)


def test_a_spike_of_one_step_in_a_million_stays():
    noise = random.Random(0)
    curve = _curve(((step, noise.random()) for step in range(1_000_000) if step != 654_321), 1024)
    curve.add(654_321, 50.0)
    assert (654_321, 50.0) in curve.points()
    assert 512 <= len(curve.points()) <= 2048


def test_an_empty_curve_has_no_points():
    curve = Curve()
    assert (curve.points(), curve.first, curve.last, curve.least, curve.largest) == ([], None, None, None, None)
