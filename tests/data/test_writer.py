"""A split is one stream, cut between documents into files of bounded size, and taken up where it was left."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.encode import Documents
from forge.data.shard import open_shard
from forge.data.writer import SplitWriter
from forge.errors import DataError
from forge.files import file_digest

EOD = 9
DOCUMENTS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), max_size=12)


def _documents(documents) -> Documents:
    tokens = [token for document in documents for token in [*document, EOD]]
    lengths = [len(document) + 1 for document in documents]
    return Documents(np.array(tokens, np.uint16), np.array(lengths, np.int64), np.array(lengths, np.int64) * 3)


def _writer(folder, shard_tokens) -> SplitWriter:
    return SplitWriter(folder, "train", vocab_size=10, eod_id=EOD, shard_tokens=shard_tokens)


def _read(folder, files) -> list[list[int]]:
    shards = [open_shard(folder / name) for name in files]
    return [shard.read(0, shard.n_tokens).tolist() for shard in shards]


@settings(deadline=None, max_examples=60)
@given(runs=st.lists(DOCUMENTS, max_size=5), shard_tokens=st.integers(1, 40))
def test_files_hold_all_documents_in_order_whole_and_as_many_as_fit(tmp_path_factory, runs, shard_tokens):
    folder = tmp_path_factory.mktemp("split")
    writer = _writer(folder, shard_tokens)
    for run in runs:
        writer.add(_documents(run))
    files = writer.finish()
    documents = [[*document, EOD] for run in runs for document in run]
    contents = _read(folder, files)
    assert [token for content in contents for token in content] == [t for d in documents for t in d]
    assert list(files) == [f"train-{i:05d}.bin" for i in range(len(files))]
    assert all(c[-1] == EOD and (len(c) <= shard_tokens or c.count(EOD) == 1) for c in contents)
    assert all(len(left) + right.index(EOD) + 1 > shard_tokens for left, right in pairwise(contents))
    for (name, entry), content in zip(files.items(), contents, strict=True):
        assert (entry.tokens, entry.documents, entry.bytes) == (len(content), content.count(EOD), 3 * len(content))
        assert entry.sha256 == file_digest(folder / name) and open_shard(folder / name).n_bytes == entry.bytes


@settings(deadline=None, max_examples=60)
@given(before=DOCUMENTS, lost=DOCUMENTS, after=DOCUMENTS, shard_tokens=st.integers(1, 40))
def test_taken_up_where_it_was_synced_it_writes_the_same_bytes(tmp_path_factory, before, lost, after, shard_tokens):
    straight, broken = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("broken")
    writer = _writer(straight, shard_tokens)
    writer.add(_documents(before))
    writer.add(_documents(after))
    expected = writer.finish()
    writer = _writer(broken, shard_tokens)
    writer.add(_documents(before))
    partial, files = writer.sync(), dict(writer.files)
    writer.add(_documents(lost))
    writer.close()
    writer = _writer(broken, shard_tokens)
    writer.take_up(files, partial)
    writer.add(_documents(after))
    assert writer.finish() == expected
    assert all((broken / name).read_bytes() == (straight / name).read_bytes() for name in expected)


@settings(deadline=None, max_examples=60)
@given(documents=DOCUMENTS.filter(bool), shard_tokens=st.integers(1, 40), again=st.booleans())
def test_the_last_document_can_be_taken_out(tmp_path_factory, documents, shard_tokens, again):
    folder = tmp_path_factory.mktemp("last")
    writer = _writer(folder, shard_tokens)
    writer.add(_documents(documents))
    if again:
        partial, files = writer.sync(), dict(writer.files)
        writer.close()
        writer = _writer(folder, shard_tokens)
        writer.take_up(files, partial)
    last = writer.take_last()
    assert (last.tokens.tolist(), last.lengths.tolist(), last.n_bytes.tolist()) == (
        [*documents[-1], EOD],
        [len(documents[-1]) + 1],
        [3 * len(documents[-1]) + 3],
    )
    files = writer.finish()
    assert [t for content in _read(folder, files) for t in content] == [t for d in documents[:-1] for t in [*d, EOD]]
    assert sum(entry.bytes for entry in files.values()) == sum(3 * len(d) + 3 for d in documents[:-1])
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)


@pytest.mark.parametrize("damage", ["changed", "cut", "odd", "gone"])
def test_a_file_that_is_not_as_it_was_left_is_named(tmp_path, damage):
    writer = _writer(tmp_path, 100)
    writer.add(_documents([[1, 2, 3], [4]]))
    partial = writer.sync()
    writer.close()
    file = tmp_path / "train-00000.bin"
    content = bytearray(file.read_bytes())
    content[66] ^= 1
    kept = {"changed": content, "cut": content[:70], "odd": content[:71], "gone": b""}[damage]
    file.write_bytes(kept)
    if damage == "gone":
        file.unlink()
    with pytest.raises(DataError, match=r"train-00000\.bin: "):
        _writer(tmp_path, 100).take_up({}, partial)
