"""Streams: every token once, the same batches after any interruption, for any number of ranks."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import IGNORE, IteratorStream, Stream, StreamBatches, build_tokenizer, open_hub_stream
from forge.errors import ConfigError, DataError
from forge.pytree import tree_equal

EOD = 99
DOCUMENTS = st.lists(st.lists(st.integers(0, 98), max_size=7), min_size=1, max_size=8).filter(any)


def _stream(documents):
    return IteratorStream(lambda start: islice(documents, start, None))


def _batches(stream, seq_len=4, size=2, **options) -> StreamBatches:
    given = {"text_key": "text", "micro_batch_size": 1, "isolate_documents": False} | options
    return StreamBatches(
        stream, build_tokenizer("bytes").encode, EOD, 100, seq_len=seq_len, global_batch_size=size, **given
    )


def _taken(batch_at, steps):
    return [batch_at(step)[0] for step in steps]


@settings(deadline=None, max_examples=50)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 6), size=st.integers(1, 3))
def test_the_rows_are_the_documents_one_after_another_epoch_after_epoch(documents, seq_len, size):
    batches = _taken(_batches(_stream(documents), seq_len, size).open(), range(6))
    flat = [token for document in documents for token in (*document, EOD) if document]
    tokens = (flat * (6 * seq_len * size // len(flat) + 2))[: 6 * seq_len * size + 1]
    assert torch.cat([batch.input_ids.flatten() for batch in batches]).tolist() == tokens[:-1]
    assert torch.cat([batch.labels.flatten() for batch in batches]).tolist() == tokens[1:]


@settings(deadline=None, max_examples=50)
@given(documents=DOCUMENTS, seq_len=st.integers(1, 6), stop=st.integers(1, 12))
def test_a_position_kept_as_json_goes_on_in_the_middle_of_a_document_and_of_any_epoch(documents, seq_len, stop):
    batch_at = _batches(_stream(documents), seq_len).open()
    *_, (_, position) = [batch_at(step) for step in range(stop)]
    resumed = _batches(_stream(documents), seq_len).open(json.loads(json.dumps(position)))
    for step in range(stop, stop + 8):
        (batch, before), (again, after) = batch_at(step), resumed(step)
        assert tree_equal(batch, again) and before == after


@settings(deadline=None, max_examples=25)
@given(documents=DOCUMENTS, ranks=st.sampled_from([1, 2, 4]), step=st.integers(0, 6))
def test_ranks_share_the_batch_and_stand_at_one_position(documents, ranks, step):
    whole, place = _batches(_stream(documents), size=4, isolate_documents=True).open()(step)
    parts = [
        _batches(_stream(documents), size=4, isolate_documents=True, rank=rank, ranks=ranks).open()(step)
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat([batch.input_ids for batch, _ in parts]), whole.input_ids)
    assert torch.equal(torch.cat([batch.labels for batch, _ in parts]), whole.labels)
    assert all(position == place for _, position in parts)


def test_batches_between_are_dropped_and_none_is_given_again():
    documents = [[n] * 5 for n in range(9)]
    batch_at, jumping = _batches(_stream(documents)).open(), _batches(_stream(documents)).open()
    expected = _taken(batch_at, range(6))
    assert all(
        tree_equal(a, b) for a, b in zip(_taken(jumping, (1, 4, 5)), (expected[i] for i in (1, 4, 5)), strict=True)
    )
    with pytest.raises(IndexError, match="batch 5 of a stream that has given 6"):
        jumping(5)


def test_documents_are_kept_apart():
    batch, _ = _batches(_stream([[5, 6], [7, 8]]), seq_len=6, size=1, isolate_documents=True).open()(0)
    assert batch.doc_ids.tolist() == [[[0, 0, 0, 1, 1, 1]]]
    assert batch.labels.tolist() == [[[6, EOD, IGNORE, 8, EOD, IGNORE]]]


def test_texts_and_records_are_encoded_and_ids_taken_as_they_are():
    documents = ["AB", {"text": "C", "url": "x"}, np.array([7], np.uint16), [8], ""]
    batch, _ = _batches(_stream(documents), seq_len=9, size=1).open()(0)
    assert batch.input_ids.flatten().tolist() == [65, 66, EOD, 67, EOD, 7, EOD, 8, EOD]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1], [2, 100]], "document 1 of epoch 0 of the stream has ids 2 to 100, outside model.vocab_size = 100"),
        ([[1], [-1]], "has ids -1 to -1"),
        ([{"body": "x"}], "document 0 of epoch 0 of the stream has body, but no data.text_key = 'text'"),
        ([[1.5]], "is neither a text nor token ids, but list"),
        ([[[1], [2]]], "is neither a text nor token ids, but list"),
        ([], "the stream holds no document with a token in epoch 0"),
        (["", ""], "the stream holds no document with a token in epoch 0"),
    ],
)
def test_what_cannot_be_trained_on_is_named(documents, message):
    with pytest.raises(DataError) as caught:
        _batches(_stream(documents)).open()(0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_state_that_json_cannot_hold_is_refused_before_it_is_needed():
    class Odd(IteratorStream):
        def state_dict(self):
            return {"at": object()}

    with pytest.raises(DataError, match=r"state_dict\(\) must be numbers, texts, lists and dicts"):
        _batches(Odd(lambda start: [[1, 2], [3]])).open()(0)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError, match=r"= 2 is not divisible by train\.micro_batch_size = 1 x 4 data-parallel ranks"
    ):
        _batches(_stream([[1]]), ranks=4).open()


def _records(shards):
    for shard in shards:
        for n in range(7):
            yield {"text": f"{shard}.{n} " * (n + 1)}


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_hugging_face_dataset_goes_on_exactly_through_its_own_state(stop):
    datasets = pytest.importorskip("datasets")

    def stream():
        made = datasets.IterableDataset.from_generator(_records, gen_kwargs={"shards": [0, 1, 2]})
        return made.map(lambda record: {"text": record["text"].upper()}).shuffle(seed=3, buffer_size=1)

    assert isinstance(stream(), Stream)
    batch_at = _batches(stream(), seq_len=16).open()
    *_, (_, position) = [batch_at(step) for step in range(stop)]
    resumed = _batches(stream(), seq_len=16).open(json.loads(json.dumps(position)))
    assert all(tree_equal(batch_at(step)[0], resumed(step)[0]) for step in range(stop, stop + 20))
    assert batch_at(stop + 20)[1]["epoch"] > 0


def test_a_local_folder_is_streamed_by_its_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"body": c * 3}) + "\n" for c in "ABC"))
    batches = evolve(_batches(open_hub_stream(f"hf-stream:{tmp_path / 'data'}"), seq_len=7, size=1), text_key="body")
    batch, _ = batches.open()(0)
    assert batch.input_ids.flatten().tolist() == [65, 65, 65, EOD, 66, 66, 66]
    with pytest.raises(DataError, match=r"hf-stream:/no/such: cannot be opened"):
        open_hub_stream("hf-stream:/no/such")
