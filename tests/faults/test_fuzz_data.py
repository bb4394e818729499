"""Bad data files and prepared folders, each one line that names the file; see `fuzzing`."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.cli_job import call
from tests.faults.fuzzing import try_examples, untrained


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    with untrained(tmp_path_factory.mktemp("fuzz")) as preset:
        yield preset


def _data_files(folder):
    """Good files of every kind that data may be."""
    text = " ".join(f"{n} times {n}" for n in range(200))
    lines = "".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(9)).encode()
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"text": [text] * 9}), folder / "good.parquet")
    np.save(folder / "good.npy", np.arange(2000, dtype=np.uint16) % 257)
    return {
        "a.txt": text.encode(),
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines, mtime=0),
        "a.parquet": (folder / "good.parquet").read_bytes(),
        "a.npy": (folder / "good.npy").read_bytes(),
        "a.bin": (np.arange(2000) % 257).astype("<u2").tobytes(),
    }


@st.composite
def _damage_of_data(draw):
    how = draw(st.sampled_from(["cut", "bytes", "noise", "short", "empty", "folder", "missing", "spoilt line"]))
    name = draw(st.sampled_from(["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.npy", "a.bin"]))
    return name, how, draw(st.integers(0, 2**31))


def _spoil(content, how, chance):
    at = chance.randrange(len(content))
    if how == "bytes":
        for _ in range(6):
            at = chance.randrange(len(content) if chance.random() < 0.5 else min(200, len(content)))
            content = content[:at] + bytes([chance.randrange(128, 256)]) + content[at + 1 :]
        return content
    line = chance.choice([b"{}\n", b"[]\n", b'{"text": 5}\n', b'{"text": null}\n', b"5\n", b'{"text": "a\n', b"\xff\n"])
    noise = chance.randbytes(1 + chance.randrange(300))
    kinds = {
        "cut": content[:at],
        "noise": noise,
        "short": content[: at % 9],
        "empty": b"",
        "spoilt line": content + line,
    }
    return kinds[how]


@pytest.mark.slow
def test_unusable_data_is_refused_by_its_file(preset, tmp_path):
    good = _data_files(tmp_path)

    def check(count, example):
        name, how, seed = example
        file = preset.parent / "data" / name
        file.parent.mkdir(exist_ok=True)
        if how == "folder":
            file.mkdir()
        elif how != "missing":
            file.write_bytes(_spoil(good[name], how, random.Random(seed)))
        content = (how, name, file.read_bytes() if file.is_file() else seed)
        try:
            names = [str(file), "model.vocab_size", "train.seq_len"]
            count.check(content, names, "--config", preset, "--data.path", file)
        finally:
            file.rmdir() if how == "folder" else file.unlink(missing_ok=True)

    try_examples("data", preset, _damage_of_data(), check)


@pytest.mark.slow
def test_a_damaged_prepared_folder_or_tokenizer_is_refused_by_its_file(preset, tmp_path):
    folder = preset.parent / "prepared"
    assert call("prepare", "--path", preset.parent / "text", "--out", folder, "--eval-fraction", "0.2")[0] == 0
    good = {path.name: path.read_bytes() for path in folder.iterdir()}

    def check(count, example):
        which, how, seed = example
        file = folder / sorted(good)[which % len(good)]
        chance = random.Random(seed)
        if how == "remove":
            file.unlink()
        else:
            file.write_bytes(_spoil(good[file.name], how, chance))
        try:
            names = [file.name, str(folder), "model.vocab_size", "train.seq_len", "data.tokenizer"]
            count.check((file.name, how, seed), names, "--config", preset, "--data.path", folder)
        finally:
            file.write_bytes(good[file.name])

    hows = st.sampled_from(["cut", "bytes", "noise", "short", "empty", "remove"])
    try_examples("tokens", preset, st.tuples(st.integers(0, 9), hows, st.integers(0, 2**31)), check)
