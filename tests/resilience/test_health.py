"""The ranks that differ are named; the comparison is of bits, and of the parameters among replicas alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.resilience.health import Fingerprint, build_health_check, checksum, find_difference
from forge.training.runtime import Runtime

EQUAL = Fingerprint(step=4, tokens=512, loss=7, grad_norm=9, place=0, checksum=-3)


@settings(deadline=None)
@given(
    ranks=st.integers(3, 9), field=st.sampled_from(["step", "tokens", "loss", "grad_norm", "checksum"]), data=st.data()
)
def test_the_few_that_differ_from_most_are_named_with_what_differs(ranks, field, data):
    odd = data.draw(st.sets(st.integers(0, ranks - 1), max_size=(ranks - 1) // 2))
    prints = [evolve(EQUAL, **{field: getattr(EQUAL, field) + (rank in odd)}) for rank in range(ranks)]
    found = find_difference(prints)
    assert (list(found.ranks), found.what) == (sorted(odd), field) if odd else found is None


def test_of_two_that_differ_the_first_is_taken_as_right_and_both_are_there():
    found = find_difference([EQUAL, evolve(EQUAL, loss=8)])
    assert (found.ranks, found.right, found.what) == ([1], [0], "loss")


@settings(deadline=None)
@given(places=st.lists(st.integers(0, 2), min_size=2, max_size=8), sums=st.lists(st.integers(0, 1), min_size=8))
def test_checksums_are_compared_among_ranks_that_hold_the_same_part(places, sums):
    prints = [evolve(EQUAL, place=place, checksum=value) for place, value in zip(places, sums, strict=False)]
    equal = max(Counter(place for place, _ in {(each.place, each.checksum) for each in prints}).values()) == 1
    assert (find_difference(prints) is None) == equal


@settings(deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    data=st.data(),
)
def test_any_one_changed_bit_changes_the_checksum(dtype, sizes, data):
    tensors = [torch.arange(size).to(dtype) for size in sizes]
    before = int(checksum(tensors))
    bits = [t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]) for t in tensors]
    which = data.draw(st.sampled_from([row for row in bits if row.numel()]))
    at, bit = data.draw(st.integers(0, which.numel() - 1)), data.draw(st.integers(0, 8 * which.element_size() - 1))
    mask = torch.ones((), dtype=which.dtype) << bit
    which[at] ^= mask
    assert int(checksum(tensors)) != before
    which[at] ^= mask
    assert int(checksum(tensors)) == before


def test_parts_that_changed_places_change_the_checksum():
    one, two = torch.tensor([1.0, math.inf]), torch.tensor([2.0])
    assert int(checksum([one, two])) != int(checksum([two, one]))


@pytest.mark.parametrize("interval", [0, 1])
def test_a_process_alone_checks_nothing(interval):
    build_health_check(Runtime(torch.device("cpu"), torch.float32, torch.float32), interval)(1, None, None, True)
