"""A prepared folder is whole or not there, the same wherever it is made, and made once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attrs import evolve
from tokenizers import Tokenizer, models

from forge.config import DataConfig
from forge.data import ByteTokenizer, open_dataset, prepare, prepared, read_manifest
from forge.errors import DataError

BYTES = ByteTokenizer()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index}\n" * (index + 1))
    (folder / "empty.txt").write_text("")
    return folder


def _config(corpus, tmp_path, **changes):
    return evolve(DataConfig(path=str(corpus), cache_dir=str(tmp_path / "cache"), eval_fraction=0.2), **changes)


def _tokens(folder, split):
    dataset = open_dataset(folder, split)
    return dataset.read(0, dataset.n_tokens).tolist()


def test_every_document_lands_whole_in_one_split(corpus, tmp_path):
    prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.2)
    found = []
    for split in ("train", "eval"):
        document = []
        for token in _tokens(tmp_path / "out", split):
            if token == BYTES.eod_id:
                found.append(BYTES.decode(document))
                document = []
            else:
                document.append(token)
        assert document == []
    assert sorted(found) == sorted(file.read_text() for file in corpus.iterdir() if file.stat().st_size)


def test_the_manifest_states_counts_checksums_and_tokenizer(corpus, tmp_path):
    manifest = prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.2)
    assert read_manifest(tmp_path / "out") == manifest
    assert (manifest.source, manifest.tokenizer, manifest.vocab_size, manifest.eod_id) == (
        str(corpus),
        "bytes",
        257,
        256,
    )
    assert sum(entry.documents for entry in manifest.files.values()) == 20
    for name, entry in manifest.files.items():
        assert entry.sha256 == hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        assert entry.tokens == entry.bytes + entry.documents
    assert sorted(os.listdir(tmp_path / "out")) == ["eval-00000.bin", "manifest.json", "train-00000.bin"]


def test_the_same_text_elsewhere_gives_the_same_bytes(corpus, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in sorted(corpus.iterdir(), reverse=True):
        (moved / file.name).write_bytes(file.read_bytes())
    left = prepare(str(corpus), tmp_path / "a", BYTES, eval_fraction=0.2)
    right = prepare(str(moved), tmp_path / "b", BYTES, eval_fraction=0.2)
    assert left.files == right.files


def test_a_single_file_is_split_by_length_and_no_share_writes_no_held_out_file(corpus, tmp_path):
    file = corpus / "19.txt"
    prepare(str(file), tmp_path / "cut", BYTES, eval_fraction=0.25)
    text = BYTES.decode(_tokens(tmp_path / "cut", "train")) + BYTES.decode(_tokens(tmp_path / "cut", "eval"))
    assert text == file.read_text()
    manifest = prepare(str(file), tmp_path / "whole", BYTES, eval_fraction=0)
    assert list(manifest.files) == ["train-00000.bin"]
    with pytest.raises(DataError, match="holds no eval data"):
        open_dataset(tmp_path / "whole", "eval")


def test_progress_comes_to_all_bytes(corpus, tmp_path):
    seen = []
    prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.2, progress=lambda *done: seen.append(done))
    total = sum(file.stat().st_size for file in corpus.iterdir())
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_a_folder_that_holds_something_is_never_overwritten(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match="out: exists already"):
        prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.2)
    assert os.listdir(tmp_path / "out") == ["mine.txt"]


def test_an_empty_folder_may_be_the_current_one(corpus, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare(str(corpus), Path("."), BYTES, eval_fraction=0.2)
    assert "manifest.json" in os.listdir(tmp_path / "here")


def test_text_without_one_readable_document_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="every file is empty or not UTF-8"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", BYTES, eval_fraction=0.2)


def test_a_place_that_cannot_be_written_is_one_line_that_names_it(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out: cannot be written"):
        prepare(str(corpus), tmp_path / "file" / "out", BYTES, eval_fraction=0.2)


def test_a_failure_before_a_file_is_finished_leaves_nothing_behind(corpus, tmp_path):
    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(corpus), tmp_path / "place" / "out", BYTES, eval_fraction=0.2, progress=fail)
    assert os.listdir(tmp_path / "place") == []


def test_what_a_killed_process_left_is_used_or_removed_next_time(corpus, tmp_path):
    out = tmp_path / "place" / "out"
    pid = os.fork()
    if pid == 0:
        prepare(str(corpus), out, BYTES, eval_fraction=0.2, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert os.listdir(out.parent) == [".out.work"]
    prepare(str(corpus), out, BYTES, eval_fraction=0.2)
    assert os.listdir(out.parent) == ["out"]


def test_a_prepared_folder_is_taken_as_it_is(corpus, tmp_path):
    prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.2)
    assert prepared(_config(tmp_path / "out", tmp_path)) == tmp_path / "out"
    assert not (tmp_path / "cache").exists()


def test_text_is_prepared_once_and_again_only_when_something_changed(corpus, tmp_path):
    calls = []
    config = _config(corpus, tmp_path)

    def folder(config):
        return prepared(config, progress=lambda done, total: calls.append(done))

    first = folder(config)
    assert calls and folder(config) == first
    count = len(calls)
    assert folder(config) == first and len(calls) == count
    assert folder(evolve(config, prefetch=9, isolate_documents=False)) == first
    assert folder(evolve(config, eval_fraction=0.3)) != first
    (corpus / "3.txt").write_text("changed text")
    changed = folder(config)
    assert changed != first
    assert "changed text" in "".join(BYTES.decode(_tokens(changed, split)) for split in ("train", "eval"))


def test_a_tokenizer_file_that_changed_prepares_the_text_again(corpus, tmp_path):
    file, folders = tmp_path / "tokenizer.json", []
    for words in ({"[UNK]": 0, "document": 1}, {"[UNK]": 0, "document": 2}):
        inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        inner.add_special_tokens(["</s>"])
        inner.save(str(file))
        folders.append(prepared(_config(corpus, tmp_path, tokenizer=str(file))))
    assert folders[0] != folders[1]
    assert [read_manifest(folder).tokenizer for folder in folders] == [str(file)] * 2


def test_processes_that_prepare_the_same_at_once_wait_for_one_and_get_its_folder(corpus, tmp_path):
    config, together, made = _config(corpus, tmp_path), threading.Barrier(4), []

    def run(_):
        together.wait(10)
        return prepared(config, progress=lambda *_: made.append(threading.get_ident()))

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(run, range(4)))
    (folder,) = folders
    assert len(set(made)) == 1
    assert os.listdir(folder.parent) == [folder.name]
    assert len(_tokens(folder, "train")) == read_manifest(folder).files["train-00000.bin"].tokens


def test_a_folder_that_appears_meanwhile_is_not_overwritten(corpus, tmp_path):
    out = tmp_path / "out"

    def intrude(done, total):
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("keep")

    with pytest.raises(DataError, match="out: cannot be written"):
        prepare(str(corpus), out, BYTES, eval_fraction=0.2, progress=intrude)
    assert os.listdir(out) == ["mine.txt"]


def test_a_file_that_the_manifest_does_not_describe_is_refused(corpus, tmp_path):
    out = tmp_path / "out"
    prepare(str(corpus), out, BYTES, eval_fraction=0.2)
    content = json.loads((out / "manifest.json").read_text())
    content["files"]["train-00000.bin"]["tokens"] += 1
    (out / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"train-00000\.bin: .* where the manifest says"):
        open_dataset(out, "train")
    (out / "eval-00000.bin").unlink()
    with pytest.raises(DataError, match=r"eval-00000\.bin: no such token file"):
        open_dataset(out, "eval")
