"""The order is a permutation at any length, without ever being stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import permuted, permuted_array

SEEDS = st.integers(-(2**70), 2**70)


@settings(deadline=None)
@given(length=st.integers(1, 3000), seed=SEEDS)
def test_the_permutation_is_a_bijection(length, seed):
    assert np.array_equal(np.sort(permuted_array(np.arange(length), length, seed)), np.arange(length))


@settings(deadline=None)
@given(length=st.integers(1, 2**62), seed=SEEDS, data=st.data())
def test_one_index_and_many_agree_and_stay_in_range_at_any_length(length, seed, data):
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=10, unique=True))
    many = permuted_array(np.array(indices), length, seed).tolist()
    assert many == [permuted(index, length, seed) for index in indices]
    assert len(set(many)) == len(many) and all(0 <= value < length for value in many)


@settings(deadline=None)
@given(length=st.integers(50, 3000), seed=SEEDS, other=SEEDS)
def test_different_seeds_give_different_orders(length, seed, other):
    left, right = (permuted_array(np.arange(length), length, s) for s in (seed, other))
    assert np.array_equal(left, right) == (seed == other)


def test_the_order_does_not_change_between_versions_of_forge():
    assert permuted_array(np.arange(8), 8, 0).tolist() == [7, 5, 4, 0, 6, 3, 2, 1]


@pytest.mark.parametrize("length", [2, 3, 5, 16])
def test_over_many_seeds_every_index_lands_everywhere_equally_often(length):
    seeds = 2000
    counts = np.zeros((length, length))
    for seed in range(seeds):
        counts[np.arange(length), permuted_array(np.arange(length), length, seed)] += 1
    deviation = np.abs(counts / seeds - 1 / length) / np.sqrt((1 / length) * (1 - 1 / length) / seeds)
    assert deviation.max() < 5


def test_neighbours_do_not_stay_neighbours():
    order = permuted_array(np.arange(100_000), 100_000, 1)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02


@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_an_index_outside_the_range_is_an_error(index):
    with pytest.raises(IndexError, match=rf"index {index} is not in \[0, 10\)"):
        permuted(index, 10, 0)
