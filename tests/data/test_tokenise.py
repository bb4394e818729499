"""The token files are the documents in order, whatever the runs, the files' size, the workers, and the interruptions."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import ByteTokenizer, open_dataset, prepare, readers, sources, tokenise
from forge.data.documents import cut, is_held_out
from forge.errors import DataError

BYTES = ByteTokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@pytest.fixture(autouse=True, scope="module")
def _small_runs():
    with pytest.MonkeyPatch.context() as patch:
        for module in (readers, sources):
            patch.setattr(module, "RUN_BYTES", 40)
            patch.setattr(module, "ROWS_AT_ONCE", 3)
        yield


@frozen
class _Corpus:
    """What a folder holds: some text files, and documents in a packed and an open file of lines and in a table."""

    texts: list[str]
    packed: list[str]
    lines: list[str]
    rows: list[str]

    def write(self, folder: Path) -> str:
        folder.mkdir()
        for n, text in enumerate(self.texts):
            (folder / f"a{n:03d}.txt").write_bytes(text.encode())
        (folder / "b.jsonl.gz").write_bytes(gzip.compress(_json_lines(self.packed)))
        (folder / "c.jsonl").write_bytes(_json_lines(self.lines))
        pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.array(self.rows, pyarrow.string())}), folder / "d.parquet"
        )
        return str(folder)

    def documents(self) -> list[tuple[str, str]]:
        named = [(f"a{n:03d}.txt", text) for n, text in enumerate(self.texts)]
        for name, texts in (("b.jsonl.gz", self.packed), ("c.jsonl", self.lines), ("d.parquet", self.rows)):
            named += [(f"{name}#{n}", text) for n, text in enumerate(texts)]
        return [(name, text) for name, text in named if text]


def _json_lines(texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


CORPORA = st.builds(_Corpus, *[st.lists(TEXT, max_size=8)] * 4)


def _expected(corpus, fraction) -> tuple[list[str], list[str]]:
    """The rule in a few lines: by name, with the last document where one side would be empty, and the only one cut."""
    documents = corpus.documents()
    train = [text for name, text in documents if not is_held_out(name, fraction)]
    held_out = [text for name, text in documents if is_held_out(name, fraction)]
    if fraction and len(documents) == 1:
        return tuple([text] if text else [] for text in cut(documents[0][1], fraction))
    if fraction and not held_out:
        held_out.append(train.pop())
    elif fraction and not train:
        train.append(held_out.pop())
    return train, held_out


def _read(folder, manifest, split) -> list[str]:
    if not manifest.of(split):
        return []
    dataset = open_dataset(folder, split)
    tokens = dataset.read(0, dataset.n_tokens).tolist()
    texts, start = [], 0
    for end in (at for at, token in enumerate(tokens) if token == 256):
        texts.append(BYTES.decode(tokens[start:end]))
        start = end + 1
    assert start == len(tokens)
    return texts


def _content(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@settings(deadline=None, max_examples=40)
@given(corpus=CORPORA, shard_tokens=st.integers(8, 60), fraction=st.sampled_from([0, 0.02, 0.3, 0.5]))
def test_the_files_hold_each_document_once_in_order_on_its_side(tmp_path_factory, corpus, shard_tokens, fraction):
    tmp_path = tmp_path_factory.mktemp("law")
    path = corpus.write(tmp_path / "text")
    if not corpus.documents():
        with pytest.raises(DataError, match="every file is empty"):
            prepare(path, tmp_path / "out", BYTES, eval_fraction=fraction)
        return
    manifest = prepare(path, tmp_path / "out", BYTES, eval_fraction=fraction, shard_tokens=shard_tokens)
    found = tuple(_read(tmp_path / "out", manifest, split) for split in ("train", "eval"))
    assert found == _expected(corpus, fraction)
    for entry in manifest.files.values():
        assert entry.tokens <= shard_tokens or entry.documents == 1
        assert entry.bytes == entry.tokens - entry.documents
    splits = [entry.split for entry in manifest.files.values()]
    assert splits == sorted(splits, reverse=True)


class _Stop(Exception):
    pass


@settings(deadline=None, max_examples=25)
@given(corpus=CORPORA, shard_tokens=st.integers(8, 60), fraction=st.sampled_from([0, 0.3]), data=st.data())
def test_stopped_anywhere_any_number_of_times_it_ends_with_the_same_bytes(
    tmp_path_factory, corpus, shard_tokens, fraction, data
):
    tmp_path = tmp_path_factory.mktemp("stop")
    path, options = corpus.write(tmp_path / "text"), {"eval_fraction": fraction, "shard_tokens": shard_tokens}
    if not corpus.documents():
        return
    prepare(path, tmp_path / "straight", BYTES, **options)
    for _ in range(data.draw(st.integers(1, 3))):
        left = data.draw(st.integers(0, 6))

        def stop(done, total):
            nonlocal left
            left -= 1
            if left < 0:
                raise _Stop

        try:
            prepare(path, tmp_path / "out", BYTES, **options, progress=stop)
            break
        except _Stop:
            continue
    else:
        prepare(path, tmp_path / "out", BYTES, **options)
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")
    assert sorted(os.listdir(tmp_path)) == ["out", "straight", "text"]


LARGE = _Corpus(*[[f"document {n} of {k} " * (n % 5) for n in range(30)] for k in range(4)])


def _kill(seen, after) -> None:
    seen.append(1)
    if len(seen) > after:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [0, 3, 11, 19, 40, 55])
def test_killed_at_any_moment_it_goes_on_without_writing_finished_files_again(tmp_path, after):
    path, options = LARGE.write(tmp_path / "text"), {"eval_fraction": 0.2, "shard_tokens": 300}
    prepare(path, tmp_path / "straight", BYTES, **options)
    out, seen = tmp_path / "out", []
    pid = os.fork()
    if pid == 0:
        prepare(path, out, BYTES, **options, progress=lambda *_: _kill(seen, after))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    work = tmp_path / ".out.work"
    noted = json.loads((work / "progress.json").read_text())["files"] if (work / "progress.json").exists() else {}
    before = {name: (work / "folder" / name).stat() for name in noted}
    prepare(path, out, BYTES, **options, progress=lambda *done: seen.append(done))
    assert _content(out) == _content(tmp_path / "straight")
    assert all((out / name).stat().st_mtime_ns == stat.st_mtime_ns for name, stat in before.items())
    assert after < 11 or (noted and seen[0][0] > 0)


def _interrupted(tmp_path, **options) -> tuple[str, Path]:
    """A corpus, and where a call on it was stopped half way."""
    path = LARGE.write(tmp_path / "text")

    def stop(done, total):
        if done > total / 2:
            raise _Stop

    with pytest.raises(_Stop):
        prepare(path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=300, progress=stop, **options)
    return path, tmp_path / ".out.work" / "folder"


@pytest.mark.parametrize("change", ["finished", "open", "gone", "settings", "earlier text"])
def test_what_does_not_fit_any_more_is_begun_again(tmp_path, change):
    path, folder = _interrupted(tmp_path)
    names, size = sorted(file.name for file in folder.glob("train-*")), 300
    if change == "finished":
        (folder / names[0]).write_bytes(b"x" + (folder / names[0]).read_bytes()[1:])
    elif change == "open":
        (folder / names[-1]).write_bytes(b"x" * 66)
    elif change == "gone":
        (folder / names[1]).unlink()
    elif change == "settings":
        size = 200
    else:
        (Path(path) / "a001.txt").write_text("another text")
    prepare(path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=size)
    prepare(path, tmp_path / "straight", BYTES, eval_fraction=0.2, shard_tokens=size)
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")


def test_text_that_changes_after_the_place_reached_keeps_the_work_before_it(tmp_path):
    path, folder = _interrupted(tmp_path)
    before = (folder / "train-00000.bin").stat().st_mtime_ns
    (Path(path) / "d.parquet").unlink()
    (folder / "train-00099.bin").write_bytes(b"of an earlier call that came further")
    prepare(path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=300)
    assert (tmp_path / "out" / "train-00000.bin").stat().st_mtime_ns == before
    prepare(path, tmp_path / "straight", BYTES, eval_fraction=0.2, shard_tokens=300)
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")


def test_damage_is_named_and_once_that_file_is_repaired_the_work_on_those_before_it_goes_on(tmp_path):
    path = LARGE.write(tmp_path / "text")
    lines = (tmp_path / "text" / "c.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "text" / "c.jsonl").write_bytes(b"".join([b'{"text"\n', *lines]))
    with pytest.raises(DataError, match=r"c\.jsonl: line 1: not JSON"):
        prepare(path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=300)
    before = (tmp_path / ".out.work" / "folder" / "train-00000.bin").stat().st_mtime_ns
    (tmp_path / "text" / "c.jsonl").write_bytes(b"".join(lines))
    prepare(path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=300)
    prepare(path, tmp_path / "straight", BYTES, eval_fraction=0.2, shard_tokens=300)
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")
    assert (tmp_path / "out" / "train-00000.bin").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path, monkeypatch):
    path = LARGE.write(tmp_path / "text")
    monkeypatch.setattr(tokenise, "SMALL", 0)
    contents = []
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        prepare(path, out, BYTES, eval_fraction=0.2, shard_tokens=300, workers=workers)
        contents.append(_content(out))
    assert contents[0] == contents[1] == contents[2] and len(contents[0]) > 5


PARALLEL = """
import sys
from pathlib import Path
from forge.data import ByteTokenizer, prepare, readers, sources, tokenise
if __name__ == "__main__":
    tokenise.SMALL = 0
    sources.RUN_BYTES = readers.RUN_BYTES = 40
    def slowly(done, total):
        import time
        print(done, flush=True)
        time.sleep(0.05)
    prepare(sys.argv[1], Path(sys.argv[2]), ByteTokenizer(), eval_fraction=0.2, shard_tokens=300, workers=2, progress=slowly)
"""


@pytest.mark.slow
def test_a_killed_parent_takes_its_workers_with_it_and_one_process_goes_on(tmp_path):
    path = LARGE.write(tmp_path / "text")
    (tmp_path / "parallel.py").write_text(PARALLEL)
    command = [sys.executable, tmp_path / "parallel.py", path, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(20):
            process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}/cmdline").exists() for child in children)
    seen = []
    prepare(
        path, tmp_path / "out", BYTES, eval_fraction=0.2, shard_tokens=300, progress=lambda *done: seen.append(done)
    )
    prepare(path, tmp_path / "straight", BYTES, eval_fraction=0.2, shard_tokens=300)
    assert _content(tmp_path / "out") == _content(tmp_path / "straight") and seen[0][0] > 0
