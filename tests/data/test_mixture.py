"""Sources mixed as pure functions of the sequence's number: right shares everywhere, nothing twice, nothing kept."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import Shard, TokenDataset, build_batch_at, build_mixture, n_samples, shares_of
from forge.data.mixture import MOST_PLACES, _even_order, _places
from forge.errors import ConfigError, DataError
from forge.pytree import tree_equal

WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def _stream(length: int, first: int = 0, vocab_size: int = 1 << 20) -> TokenDataset:
    """Tokens that count up from `first`, without a file."""
    tokens = np.arange(first, first + length, dtype=np.uint32)
    return TokenDataset("memory", (Shard("memory", tokens, np.empty(0), vocab_size, vocab_size - 1, 0),))


def _counts(source, sources: int):
    """Of each source, among the first n sequences: (N + 1, sources)."""
    return np.concatenate([np.zeros((1, sources)), np.cumsum(np.eye(sources)[source], axis=0)])


def test_weights_at_temperature_2_are_square_roots():
    # by hand: sqrt(0.7), sqrt(0.2), sqrt(0.1) over their sum
    assert shares_of((0.7, 0.2, 0.1), 2.0) == pytest.approx([0.5229, 0.2795, 0.1976], abs=5e-5)
    assert shares_of((7, 0, 1), 1.0).tolist() == [0.875, 0.0, 0.125]
    assert shares_of((5, 0, 1), 1e9) == pytest.approx([0.5, 0.0, 0.5])


@settings(deadline=None, max_examples=30)
@given(weights=WEIGHTS, start=st.integers(0, 10**9), length=st.integers(1, 5000))
def test_every_prefix_and_every_block_has_its_shares(weights, start, length):
    mixture, sources = build_mixture([(0, weights)]), len(weights)
    (stretch,) = mixture.stretches
    shares, bound = stretch.counts / len(stretch.order), 1 - 1 / max(2, 2 * sources - 2)
    assert shares == pytest.approx(shares_of(weights), abs=1 / (2 * MOST_PLACES))
    counts = _counts(mixture.place(np.arange(5000))[0], sources)
    assert np.abs(counts - np.arange(5001)[:, None] * shares).max() <= bound + 1e-6
    block = mixture.place(np.arange(start, start + length))[0]
    assert np.abs(np.bincount(block, minlength=sources) - length * shares).max() <= 2 * bound + 1e-6


def test_any_1000_samples_of_three_sources_are_within_one_of_the_nearest_whole_shares():
    shares, sources = shares_of((0.7, 0.2, 0.1), 2.0), 3
    counts = _counts(build_mixture([(0, (0.7, 0.2, 0.1))], 2.0).place(np.arange(100_000))[0], sources)
    assert np.abs(counts[1000] - 1000 * shares).max() < 1
    blocks = counts[1000:] - counts[:-1000]
    assert np.abs(blocks - np.rint(1000 * shares)).max() <= 1
    assert np.abs(blocks - 1000 * shares).max() < 1.5


@settings(deadline=None, max_examples=20)
@given(share=st.floats(0.001, 0.999), start=st.integers(0, 10**6), length=st.integers(1, 10**4))
def test_any_block_of_two_sources_is_within_one_of_its_shares(share, start, length):
    mixture = build_mixture([(0, (share, 1 - share))])
    counts = mixture.stretches[0].counts
    drawn = np.bincount(mixture.place(np.arange(start, start + length))[0], minlength=2)
    assert np.abs(drawn - length * counts / counts.sum()).max() <= 1 + 1e-6


def test_whole_ratios_make_a_round_of_their_own_and_a_weight_of_zero_is_never_drawn():
    assert _places(shares_of((0.7, 0.2, 0.1))).tolist() == [7, 2, 1]
    assert _places(shares_of((1, 0, 1, 1))).tolist() == [1, 0, 1, 1]
    assert 1 not in build_mixture([(0, (3, 0, 1))]).place(np.arange(1000))[0]


@pytest.mark.parametrize("counts", [(1,), (3, 1), (1, 1, 1), (90, 5, 5), (18, *[1] * 20), (0, 2, 1)])
def test_an_order_holds_each_source_as_often_as_it_should(counts):
    assert np.bincount(_even_order(np.array(counts)), minlength=len(counts)).tolist() == list(counts)


def test_a_weight_too_small_to_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="less than one sequence in 32768"):
        build_mixture([(0, (1.0, 1e-6))])


PHASES = st.lists(st.tuples(st.integers(1, 40), st.tuples(*[st.integers(0, 9)] * 3).filter(any)), max_size=4)


@settings(deadline=None, max_examples=50)
@given(weights=st.tuples(*[st.integers(0, 9)] * 3).filter(any), phases=PHASES, start=st.integers(0, 100))
def test_each_source_goes_on_where_it_was_across_phases_and_resumes(weights, phases, start):
    changes = [(0, weights)]
    for length, new in phases:
        changes.append((changes[-1][0] + length, new))
    source, position = build_mixture(changes).place(np.arange(300))
    for at in range(3):
        drawn = position[source == at]
        assert drawn.tolist() == list(range(len(drawn)))
    resumed = build_mixture(changes).place(np.arange(start, 300))
    assert np.array_equal(resumed[0], source[start:]) and np.array_equal(resumed[1], position[start:])


@settings(deadline=None, max_examples=20)
@given(
    weights=st.tuples(*[st.integers(1, 9)] * 2), change=st.integers(1, 60), later=st.tuples(*[st.integers(0, 9)] * 2)
)
def test_no_sample_repeats_within_an_epoch_and_every_epoch_is_permuted_anew(weights, change, later):
    datasets = {"a": _stream(4 * 5 + 1), "b": _stream(4 * 11 + 1, first=1000)}
    mixture = build_mixture([(0, weights), (change * 2, later if any(later) else weights)])
    batch_at = build_batch_at(
        datasets, mixture, seq_len=4, global_batch_size=2, micro_batch_size=1, data_seed=3, isolate_documents=False
    )
    batches = [batch_at(step) for step in range(100)]
    rows = torch.cat([batch.input_ids.flatten(0, 1) for batch in batches])[:, 0]
    source = torch.cat([batch.source_ids.flatten() for batch in batches])
    assert torch.equal(source == 1, rows >= 1000)
    for at, dataset in enumerate(datasets.values()):
        drawn, epoch = rows[source == at].tolist(), n_samples(dataset, 4)
        epochs = [drawn[i : i + epoch] for i in range(0, len(drawn), epoch)]
        assert all(len(set(shown)) == len(shown) for shown in epochs)
        assert len(epochs) < 5 or len({tuple(shown) for shown in epochs[:-1]}) > 1


@settings(deadline=None, max_examples=20)
@given(ranks=st.sampled_from([1, 2, 4]), step=st.integers(0, 50))
def test_a_mixed_batch_is_the_same_for_any_number_of_ranks(ranks, step):
    datasets = {"a": _stream(401), "b": _stream(205, first=1000)}
    mixture = build_mixture([(0, (3, 1)), (8 * 20, (1, 3))], 1.5)

    def batch_at(rank, ranks):
        return build_batch_at(
            datasets, mixture, seq_len=4, global_batch_size=8, micro_batch_size=2, data_seed=0,
            isolate_documents=True, rank=rank, ranks=ranks,
        )(step)  # fmt: skip

    whole, parts = batch_at(0, 1), [batch_at(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    assert torch.equal(torch.cat([part.source_ids for part in parts]), whole.source_ids)
    assert tree_equal(batch_at(0, 1), whole)


def test_sources_of_two_vocabularies_are_refused_with_both():
    datasets = {"a": _stream(100), "b": _stream(100, vocab_size=300)}
    with pytest.raises(DataError, match="different vocabularies, of 300 and 1048576 ids"):
        build_batch_at(
            datasets, build_mixture([(0, (1, 1))]), seq_len=4, global_batch_size=1, micro_batch_size=1, data_seed=0,
            isolate_documents=False,
        )  # fmt: skip


def test_the_billionth_batch_costs_what_the_first_does():
    mixture = build_mixture([(0, (0.61, 0.3, 0.09)), (10**12, (1, 1, 1))], 1.3)
    begun = time.perf_counter()
    source, position = mixture.place(np.arange(10**13, 10**13 + 1024))
    assert time.perf_counter() - begun < 1.0
    assert position.max() > 10**12 and len(set(zip(source.tolist(), position.tolist(), strict=True))) == 1024
