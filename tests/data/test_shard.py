"""Token files give back what was written, or say what is wrong with them: never a wrapped id."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import open_raw, open_shard, write_shard
from forge.errors import DataError

HEADER = 64


def _write(path, *documents, vocab_size=300, eod_id=299, **options):
    return write_shard(
        path, [np.array(d, dtype=np.int64) for d in documents], vocab_size=vocab_size, eod_id=eod_id, **options
    )


@settings(deadline=None, max_examples=40)
@given(data=st.data(), vocab_size=st.sampled_from([2, 257, 65_536, 65_537, 200_000]))
def test_every_document_comes_back_followed_by_its_end(tmp_path_factory, data, vocab_size):
    eod_id = vocab_size - 1
    ids = st.lists(st.integers(0, eod_id - 1), min_size=1, max_size=8)
    documents = data.draw(st.lists(ids, min_size=1, max_size=5))
    path = tmp_path_factory.mktemp("shard") / "t.bin"
    _write(path, *documents, vocab_size=vocab_size, eod_id=eod_id, n_bytes=7)
    shard = open_shard(path)
    flat = [token for document in documents for token in [*document, eod_id]]
    assert shard.read(0, shard.n_tokens).tolist() == flat
    assert shard.doc_ends[:].tolist() == np.cumsum([len(d) + 1 for d in documents]).tolist()
    assert (shard.vocab_size, shard.eod_id, shard.n_bytes) == (vocab_size, eod_id, 7)


def test_a_vocabulary_of_70000_stores_id_65536_and_reads_it_back(tmp_path):
    shard = _write(tmp_path / "t.bin", [65_536, 1], vocab_size=70_000, eod_id=69_999)
    assert shard.read(0, 3).tolist() == [65_536, 1, 69_999]
    assert shard.tokens[:].dtype == np.uint32


def test_tokens_take_16_bits_up_to_a_vocabulary_of_65536_and_no_further(tmp_path):
    assert _write(tmp_path / "a.bin", [65_535], vocab_size=65_536, eod_id=0).tokens[:].dtype == np.uint16
    assert _write(tmp_path / "b.bin", [65_535], vocab_size=65_537, eod_id=0).tokens[:].dtype == np.uint32


@pytest.mark.parametrize("bad", [300, -1, 65_536 + 5])
def test_writing_an_id_outside_the_vocabulary_names_file_offset_and_id_and_leaves_no_file(tmp_path, bad):
    path = tmp_path / "t.bin"
    with pytest.raises(DataError, match=rf"t\.bin: token 1 of document 1 has id {bad}"):
        _write(path, [1], [2, bad])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [300, 900])
def test_reading_an_id_beyond_the_vocabulary_names_file_offset_and_id(tmp_path, bad):
    np.array([1, 2, bad, 3], dtype=np.uint16).tofile(tmp_path / "raw.bin")
    raw = open_raw(tmp_path / "raw.bin", "uint16", 300, 299)
    assert raw.read(0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match=rf"raw\.bin: the token at offset 2 has id {bad}, beyond the vocabulary of 300"):
        raw.read(1, 4)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6)])
def test_a_range_outside_the_file_is_an_error_not_a_shorter_answer(tmp_path, start, stop):
    shard = _write(tmp_path / "t.bin", [1, 2, 3, 4])
    with pytest.raises(IndexError):
        shard.read(start, stop)


def test_empty_documents_leave_no_trace_and_nothing_but_empty_ones_is_refused(tmp_path):
    assert _write(tmp_path / "t.bin", [], [5], []).read(0, 2).tolist() == [5, 299]
    with pytest.raises(DataError, match=r"u\.bin"):
        _write(tmp_path / "u.bin", [], [])


def test_an_end_inside_a_document_counts_as_an_end(tmp_path):
    assert _write(tmp_path / "t.bin", [5, 299, 6]).doc_ends[:].tolist() == [2, 4]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    _write(tmp_path / "t.bin", [7])

    def documents():
        yield np.array([8])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "t.bin", documents(), vocab_size=300, eod_id=299)
    assert [file.name for file in tmp_path.iterdir()] == ["t.bin"]
    assert open_shard(tmp_path / "t.bin").read(0, 2).tolist() == [7, 299]


@settings(deadline=None, max_examples=60)
@given(kept=st.integers(0, HEADER + 5 * 2 + 8 - 1))
def test_a_file_cut_anywhere_is_one_error_that_names_it(tmp_path_factory, kept):
    path = tmp_path_factory.mktemp("cut") / "t.bin"
    _write(path, [1, 2, 3, 4])
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError) as caught:
        open_shard(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_cut_in_the_middle_of_a_token_says_that_it_is_cut_short(tmp_path):
    path = tmp_path / "t.bin"
    _write(path, [1, 2, 3, 4])
    path.write_bytes(path.read_bytes()[: HEADER + 3])
    with pytest.raises(DataError, match=r"t\.bin: 67 bytes where its header promises 82: cut short"):
        open_shard(path)
    raw = tmp_path / "raw.bin"
    raw.write_bytes(b"abc")
    with pytest.raises(DataError, match=r"raw\.bin: 3 bytes are no whole number of uint16 tokens"):
        open_raw(raw, "uint16", 300, 299)


@pytest.mark.parametrize("opener", [open_shard, lambda path: open_raw(path, "uint16", 300, 299)])
def test_an_empty_or_missing_file_is_one_error_that_names_it(tmp_path, opener):
    path = tmp_path / "t.bin"
    with pytest.raises(DataError, match=r"t\.bin: no such token file"):
        opener(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"t\.bin: the file is empty"):
        opener(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(b"x" * 200)
    with pytest.raises(DataError, match=r"t\.bin: not a forge token file"):
        open_shard(path)


@pytest.mark.parametrize("change", [{1: 2}, {2: 3}, {4: 300}, {5: 0}, {6: 1 << 60}])
def test_a_damaged_header_is_refused(tmp_path, change):
    path, layout = tmp_path / "t.bin", struct.Struct("<8sII5Q8x")
    _write(path, [1, 2, 3, 4])
    content = path.read_bytes()
    fields = list(layout.unpack(content[:HEADER]))
    for index, value in change.items():
        fields[index] = value
    path.write_bytes(layout.pack(*fields) + content[HEADER:])
    with pytest.raises(DataError, match=r"t\.bin: "):
        open_shard(path)


def test_a_raw_file_is_read_with_the_dtype_that_was_stated_whatever_its_size(tmp_path):
    np.array([1, 2, 3, 4], dtype=np.uint16).tofile(tmp_path / "raw.bin")
    assert open_raw(tmp_path / "raw.bin", "uint16", 300, 299).read(0, 4).tolist() == [1, 2, 3, 4]
    wide = open_raw(tmp_path / "raw.bin", "uint32", 300_000, 299)
    assert wide.read(0, 2).tolist() == [1 + (2 << 16), 3 + (4 << 16)]


def test_a_16_bit_file_with_a_vocabulary_of_70000_is_an_error_that_names_it(tmp_path):
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    with pytest.raises(DataError, match=r"raw\.bin: uint16 tokens cannot hold a vocabulary of 70000"):
        open_raw(tmp_path / "raw.bin", "uint16", 70_000, 0)


@pytest.mark.parametrize(("dtype", "eod_id"), [("int16", 0), ("float32", 0), ("uint16", 300), ("uint16", -1)])
def test_a_raw_file_needs_a_known_dtype_and_an_end_within_the_vocabulary(tmp_path, dtype, eod_id):
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    with pytest.raises(DataError, match=r"raw\.bin: "):
        open_raw(tmp_path / "raw.bin", dtype, 300, eod_id)
