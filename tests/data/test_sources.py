"""A source gives the same documents from anywhere on, wherever they lie, and says what is wrong with it."""

from __future__ import annotations

import gzip
import json
import os
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from forge.data import readers, sources
from forge.data.documents import Document
from forge.data.sources import find_source, path_digest
from forge.errors import DataError


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch):
    for module in (readers, sources):
        monkeypatch.setattr(module, "RUN_BYTES", 40)
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)


def _lines(texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


TEXTS = [f"document {n} " * (n % 4) for n in range(12)]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for n in range(7):
        (folder / f"a{n}.txt").write_text("text " * n)
    (folder / "b.jsonl").write_bytes(_lines(TEXTS))
    (folder / "c.json.gz").write_bytes(gzip.compress(_lines(TEXTS[:5])))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[:7]}), folder / "d.parquet", row_group_size=4)
    (folder / "sub" / "e.txt").write_text("the last")
    return folder


def _documents(source, start=(0, 0)) -> list[Document]:
    return [document for chunk in source.chunks(start) for document in chunk.records.documents(pytest.fail)]


def test_a_folder_of_everything_is_all_its_documents_in_order(corpus):
    expected = [Document(f"a{n}.txt", "text " * n) for n in range(7)]
    for name, texts in (("b.jsonl", TEXTS), ("c.json.gz", TEXTS[:5]), ("d.parquet", TEXTS[:7])):
        expected += [Document(f"{name}#{n}", text) for n, text in enumerate(texts)]
    assert _documents(find_source(str(corpus), "text")) == [*expected, Document("sub/e.txt", "the last")]


def _saved(tmp_path):
    datasets.Dataset.from_dict({"id": list(range(12)), "text": TEXTS}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_the_end_of_every_chunk_is_where_the_rest_begins_and_done_comes_to_all(corpus, tmp_path, kind):
    source = find_source(str(corpus if kind == "files" else _saved(tmp_path)), "text")
    whole, before = _documents(source), 0
    chunks = list(source.chunks((0, 0)))
    assert len(chunks) > 3 and source.n_bytes > 0
    for chunk in chunks:
        before += len(list(chunk.records.documents(pytest.fail)))
        assert _documents(source, chunk.end) == whole[before:]
    done = [chunk.done for chunk in chunks]
    assert done == sorted(done) and done[-1] == source.total


def test_a_digest_covers_what_lies_before_a_place_and_nothing_else(corpus):
    def digests():
        source = find_source(str(corpus), "text")
        return [source.digest(place) for place in ((0, 0), (7, 0), (7, 3), (8, 0))]

    before = digests()
    os.utime(corpus / "b.jsonl", (5, 5))
    after = digests()
    assert after[:2] == before[:2] and after[2] != before[2] and after[3] != before[3] and after[2] == after[3]


def test_a_path_has_another_digest_once_a_file_changes(corpus, tmp_path):
    for path in (corpus, corpus / "b.jsonl", _saved(tmp_path)):
        before = path_digest(str(path))
        assert path_digest(str(path)) == before
        changed = path if path.is_file() else next(file for file in sorted(path.rglob("*")) if file.is_file())
        os.utime(changed, (7, 7))
        assert path_digest(str(path)) != before
    assert path_digest("hf:some/name") == "hf:some/name"


def test_a_saved_dataset_of_splits_gives_the_one_to_train_on(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    assert _documents(find_source(str(tmp_path / "both"), "text")) == [Document("#0", "train")]
    datasets.DatasetDict({"test": parts["test"]}).save_to_disk(tmp_path / "one")
    assert _documents(find_source(str(tmp_path / "one"), "text")) == [Document("#0", "test")]
    datasets.DatasetDict({"a": parts["test"], "b": parts["train"]}).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=r"none: none of its splits \(a, b\) is 'train'"):
        find_source(str(tmp_path / "none"), "text")


def test_a_dataset_by_name_may_be_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_bytes(_lines(TEXTS))
    assert [d.text for d in _documents(find_source(f"hf:{tmp_path / 'local'}", "text"))] == TEXTS
    with pytest.raises(DataError, match=r"hf:.*:validation: cannot be loaded \(Unknown split"):
        find_source(f"hf:{tmp_path / 'local'}::validation", "text")


def test_a_dataset_by_name_is_asked_for_with_config_and_split(monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((*args, kwargs))
        return datasets.Dataset.from_dict({"text": ["x"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("hf:a/b", "hf:a/b:en", "hf:a/b:en:test", "hf:a/b::train[:1%]"):
        find_source(path, "text")
    assert asked == [
        ("a/b", None, {"split": "train"}),
        ("a/b", "en", {"split": "train"}),
        ("a/b", "en", {"split": "test"}),
        ("a/b", None, {"split": "train[:1%]"}),
    ]


def test_a_dataset_that_cannot_be_had_is_one_line_that_names_it(tmp_path, monkeypatch):
    def load(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"^hf:a/b: cannot be loaded \(Couldn't reach the hub\)$"):
        find_source("hf:a/b", "text")
    saved = _saved(tmp_path)
    with pytest.raises(DataError, match=r"saved: no column 'body' \(it has: id, text\)"):
        find_source(str(saved), "body")
    (saved / "state.json").write_text("{")
    with pytest.raises(DataError, match="saved: a damaged dataset"):
        find_source(str(saved), "text")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hf:a/b: reading it needs the package datasets: pip install datasets"):
        find_source("hf:a/b", "text")


@pytest.mark.parametrize("name", ["rows.ndjson", "ROWS.JSONL", "Rows.Ndjson.gz", "ROWS.JSONL.GZ"])
def test_json_lines_are_known_by_every_usual_name(tmp_path, name):
    rows = _lines(["one", "two"])
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.lower().endswith(".gz") else rows)
    for path in (tmp_path, tmp_path / name):
        assert [document.text for document in _documents(find_source(str(path), "text"))] == ["one", "two"]


def test_what_is_neither_a_file_nor_a_folder_is_refused_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: neither a file nor a folder"):
        find_source(str(tmp_path / "pipe"), "text")
