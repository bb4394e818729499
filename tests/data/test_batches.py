"""A batch is a pure function of its step: no token lost, no document leaking, the same for any number of ranks."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from forge.config import ModelConfig
from forge.data import (
    IGNORE,
    Shard,
    TokenDataset,
    build_batch_at,
    build_mixture,
    check_vocab,
    document_ids,
    eval_batches,
    n_samples,
    open_raw,
)
from forge.errors import ConfigError, DataError
from forge.model import build_model, init_params
from forge.pytree import tree_equal

EOD = 99


def _dataset(tmp_path, *files, vocab_size=100) -> TokenDataset:
    shards = []
    for index, tokens in enumerate(files):
        np.array(tokens, dtype=np.uint32).tofile(tmp_path / f"{index}.bin")
        shards.append(open_raw(tmp_path / f"{index}.bin", "uint32", vocab_size, EOD))
    return TokenDataset(tmp_path, tuple(shards))


def _stream(length: int, vocab_size: int = 1 << 20) -> TokenDataset:
    """Tokens that are their own position, without a file."""
    return TokenDataset("memory", (Shard("memory", np.arange(length, dtype=np.uint32), np.empty(0), vocab_size, 0, 0),))


def _batch_at(dataset, seq_len=4, global_batch_size=4, micro_batch_size=1, data_seed=0, isolate=False, **ranks):
    return build_batch_at(
        {"": dataset},
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_seed=data_seed,
        isolate_documents=isolate,
        **ranks,
    )


def _eval(dataset, seq_len=4, batch_size=1, batches=50, isolate=False):
    return eval_batches(dataset, seq_len=seq_len, batch_size=batch_size, batches=batches, isolate_documents=isolate)


def _rows(batch) -> list[list[int]]:
    return batch.input_ids.flatten(0, 1).tolist()


def test_ten_tokens_in_sequences_of_four_are_two_samples_that_share_the_token_between_and_a_short_one(tmp_path):
    (first, second, last) = _eval(_dataset(tmp_path, range(10)))
    assert (first.input_ids.tolist(), first.labels.tolist()) == ([[[0, 1, 2, 3]]], [[[1, 2, 3, 4]]])
    assert (second.input_ids.tolist(), second.labels.tolist()) == ([[[4, 5, 6, 7]]], [[[5, 6, 7, 8]]])
    assert (last.input_ids[0, 0, 0], last.labels.tolist()) == (8, [[[9, IGNORE, IGNORE, IGNORE]]])
    assert first.input_ids.dtype == first.labels.dtype == torch.int64 and first.doc_ids is None


@settings(deadline=None, max_examples=40)
@given(length=st.integers(2, 200), seq_len=st.integers(1, 12), seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_an_epoch_has_every_token_but_the_first_as_a_target_once_after_the_token_before_it(
    length, seq_len, seed, epoch
):
    dataset = _stream(length)
    if length <= seq_len:
        return
    samples = n_samples(dataset, seq_len)
    batch_at = _batch_at(dataset, seq_len, 1, 1, seed)
    batches = [batch_at(step) for step in range(epoch * samples, (epoch + 1) * samples)]
    inputs, labels = (torch.cat([getattr(b, part).flatten() for b in batches]) for part in ("input_ids", "labels"))
    real = labels != IGNORE
    assert sorted(labels[real].tolist()) == list(range(1, length))
    assert torch.equal(inputs[real] + 1, labels[real])


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(1, 98), min_size=1, max_size=9), min_size=1, max_size=12),
    seq_len=st.integers(1, 10),
    seed=st.integers(0, 9),
)
def test_packed_documents_lose_no_token_and_repeat_none(documents, seq_len, seed, tmp_path_factory):
    tokens = [token for document in documents for token in (*document, EOD)]
    if len(tokens) <= seq_len:
        return
    dataset = _dataset(tmp_path_factory.mktemp("packed"), tokens)
    samples = n_samples(dataset, seq_len)
    batch_at = _batch_at(dataset, seq_len, 1, 1, seed, isolate=True)
    labels = torch.cat([batch_at(step).labels.flatten() for step in range(samples)])
    predicted = sorted(token for document in documents for token in (*document[1:], EOD))
    assert sorted(labels[labels != IGNORE].tolist()) == predicted


def test_every_epoch_has_an_order_of_its_own():
    batch_at = _batch_at(_stream(401), 4, 100, 100)
    epochs = [_rows(batch_at(step)) for step in range(4)]
    assert all(sorted(rows) == sorted(epochs[0]) for rows in epochs)
    assert all(left != right for i, left in enumerate(epochs) for right in epochs[:i])


def test_another_data_seed_is_another_order():
    dataset = _stream(401)
    assert _rows(_batch_at(dataset, data_seed=1)(0)) != _rows(_batch_at(dataset, data_seed=2)(0))


def test_a_batch_depends_on_its_step_alone():
    dataset = _stream(401)
    batch_at, other = _batch_at(dataset), _batch_at(dataset)
    forwards = [batch_at(step) for step in range(60)]
    assert all(tree_equal(other(step), forwards[step]) for step in reversed(range(60)))


def test_a_batch_shares_no_memory_with_the_next_call():
    batch_at = _batch_at(_stream(401))
    before = batch_at(3)
    before.input_ids.zero_()
    assert not tree_equal(batch_at(3), before)


@settings(deadline=None, max_examples=25)
@given(ranks=st.sampled_from([1, 2, 3, 6]), micro=st.sampled_from([1, 2]), step=st.integers(0, 40))
def test_the_global_batch_is_the_same_in_the_same_order_for_any_number_of_ranks(ranks, micro, step):
    dataset = _stream(200)
    alone = _rows(_batch_at(dataset, 4, 12, 12)(step))
    together = [_batch_at(dataset, 4, 12, micro, rank=rank, ranks=ranks)(step) for rank in range(ranks)]
    assert [row for batch in together for row in _rows(batch)] == alone
    assert all(batch.input_ids.shape == (12 // ranks // micro, micro, 4) for batch in together)


@pytest.mark.parametrize(("micro", "ranks"), [(3, 1), (2, 4), (8, 1)])
def test_a_global_batch_that_does_not_divide_is_an_error_with_the_numbers(micro, ranks):
    with pytest.raises(ConfigError, match=rf"= 4 is not divisible by train.micro_batch_size = {micro} x {ranks} "):
        _batch_at(_stream(100), 4, 4, micro, ranks=ranks)


def test_packed_documents_are_numbered_from_0_and_no_end_has_a_target(tmp_path):
    (batch,) = _eval(_dataset(tmp_path, [5, 6, EOD, 7, 8, EOD, 9]), seq_len=6, isolate=True)
    assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1, 1]]]
    assert batch.labels.tolist() == [[[6, EOD, IGNORE, 8, EOD, IGNORE]]]
    (plain,) = _eval(_dataset(tmp_path, [5, 6, EOD, 7, 8, EOD, 9]), seq_len=6)
    assert plain.doc_ids is None and plain.labels.tolist() == [[[6, EOD, 7, 8, EOD, 9]]]


def test_document_numbers_restart_in_every_sequence(tmp_path):
    dataset = _dataset(tmp_path, [1, EOD, 2, EOD, 3, 4, EOD, 5, 6])
    assert [b.doc_ids.flatten().tolist() for b in _eval(dataset, isolate=True)] == [[0, 0, 1, 1], [0, 0, 0, 1]]


@settings(deadline=None)
@given(st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=20))
def test_a_document_number_is_the_count_of_ends_before(tokens):
    expected = [tokens[:i].count(EOD) for i in range(len(tokens))]
    assert document_ids(np.array([tokens, tokens]), EOD).tolist() == [expected, expected]


def test_changing_a_token_of_the_first_document_changes_no_logit_of_the_second(tmp_path):
    config = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=100, max_seq_len=8, init_std=0.3)
    model = build_model(config)
    params = init_params(model, config, 0)

    def logits(tokens, isolate):
        (batch,) = _eval(_dataset(tmp_path, [*tokens, 1]), seq_len=6, isolate=isolate)
        return functional_call(model, params, (batch.input_ids[0], None if not isolate else batch.doc_ids[0]))[0]

    left, right = (logits([first, 6, EOD, 7, 8, EOD], True) for first in (5, 50))
    assert torch.equal(left[3:], right[3:]) and not torch.equal(left[:3], right[:3])
    left, right = (logits([first, 6, EOD, 7, 8, EOD], False) for first in (5, 50))
    assert not torch.allclose(left[3:], right[3:])


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5), data=st.data())
def test_several_files_read_as_one_stream(tmp_path_factory, sizes, data):
    total = sum(sizes)
    files = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    dataset = _dataset(tmp_path_factory.mktemp("stream"), *files)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert dataset.n_tokens == total and dataset.read(start, stop).tolist() == list(range(start, stop))
    with pytest.raises(IndexError):
        dataset.read(start, total + 1)


def test_files_of_different_vocabularies_are_no_one_stream(tmp_path):
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "a.bin")
    shards = (open_raw(tmp_path / "a.bin", "uint16", 10, 0), open_raw(tmp_path / "a.bin", "uint16", 11, 0))
    with pytest.raises(DataError, match="do not share one vocabulary"):
        TokenDataset(tmp_path, shards)


def test_data_shorter_than_one_sequence_is_an_error_with_the_numbers(tmp_path):
    dataset = _dataset(tmp_path, range(8))
    for build in (_batch_at, _eval):
        with pytest.raises(DataError, match=r"8 tokens, one sequence of train\.seq_len = 8 needs 9"):
            build(dataset, seq_len=8)
    assert n_samples(_dataset(tmp_path, range(9)), 8) == 1


def test_a_vocabulary_larger_than_the_models_is_an_error_with_path_and_both_numbers(tmp_path):
    dataset = _dataset(tmp_path, range(8))
    check_vocab(dataset, 100)
    with pytest.raises(DataError) as caught:
        check_vocab(dataset, 99)
    assert all(part in str(caught.value) for part in (str(tmp_path), "100", "99"))


def test_an_id_beyond_the_vocabulary_is_named_with_file_and_offset_in_the_batch_that_meets_it(tmp_path):
    dataset = _dataset(tmp_path, [*range(9), 100, 1, 2, 3])
    batches = iter(_eval(dataset))
    next(batches)
    next(batches)
    with pytest.raises(DataError, match=r"0\.bin: the token at offset 9 has id 100"):
        next(batches)


def test_a_file_that_cannot_be_read_is_named_with_the_offset(tmp_path):
    class Broken(Shard):
        def read(self, start, stop):
            raise OSError(5, "Input/output error")

    good = _dataset(tmp_path, range(9)).shards[0]
    broken = Broken("broken.bin", good.tokens, good.doc_ends, good.vocab_size, good.eod_id, 0)
    dataset = TokenDataset(tmp_path, (good, broken))
    assert dataset.read(0, 9).tolist() == list(range(9))
    with pytest.raises(DataError, match=r"broken\.bin: cannot be read at offset 2 \(Input/output error\)"):
        dataset.read(11, 13)


def test_evaluation_asked_for_50_batches_of_a_set_of_7_takes_the_7_once_each_and_the_same_every_time():
    batches = _eval(_stream(7 * 4 + 1))
    assert len(batches) == 7
    first, again = list(batches), list(batches)
    assert [_rows(b)[0][0] for b in first] == [0, 4, 8, 12, 16, 20, 24]
    assert all(tree_equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_last_evaluation_batch_may_be_smaller():
    batches = _eval(_stream(7 * 4 + 1), batch_size=3)
    assert [tuple(b.input_ids.shape) for b in batches] == [(1, 3, 4), (1, 3, 4), (1, 1, 4)] and len(batches) == 3


@settings(deadline=None)
@given(samples=st.integers(1, 300), batch_size=st.integers(1, 9), asked=st.integers(1, 9))
def test_a_large_evaluation_set_is_sampled_evenly_and_without_repeats(samples, batch_size, asked):
    batches = _eval(_stream(samples * 2 + 1), 2, batch_size, asked)
    starts = [row[0] // 2 for batch in batches for row in _rows(batch)]
    wanted = min(samples, batch_size * asked)
    assert len(starts) == wanted and len(set(starts)) == wanted and starts == sorted(starts)
    gaps = np.diff(starts, append=samples)
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells memory by /proc")
def test_a_hundred_billion_tokens_are_planned_and_read_in_seconds_and_in_little_memory(tmp_path):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(200_000_000_000)
    begun, before = time.perf_counter(), _own_bytes()
    dataset = TokenDataset(path, (open_raw(path, "uint16", 50257, 50256),))
    assert dataset.n_tokens == 100_000_000_000
    mixture = build_mixture([(0, (0.61, 0.39)), (10**8, (0.2, 0.8))], 1.5)
    batch_at = build_batch_at(
        {"a": dataset, "b": dataset}, mixture, seq_len=2048, global_batch_size=8, micro_batch_size=4, data_seed=0,
        isolate_documents=True,
    )  # fmt: skip
    for step in (0, 6_000_000, 10**7, 3 * 10**7):
        assert batch_at(step).input_ids.shape == (2, 4, 2048)
    assert time.perf_counter() - begun < 10
    assert _own_bytes() - before < 64 << 20


def _own_bytes() -> int:
    """Memory of this process that is no cache of files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def test_bytes_per_token_is_known_only_where_every_file_knows_it():
    known = Shard("a", np.arange(10, dtype=np.uint16), np.empty(0), 100, 0, 25)
    unknown = Shard("b", np.arange(10, dtype=np.uint16), np.empty(0), 100, 0, 0)
    assert TokenDataset("x", (known, known)).bytes_per_token == 2.5
    assert TokenDataset("x", (known, unknown)).bytes_per_token == 0
