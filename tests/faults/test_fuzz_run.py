"""Damaged run folders and tokenizers: `report` shows what is whole, and all else is one line that names the file."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers

from forge.data.tokenizer import JsonTokenizer
from forge.errors import DataError
from tests.cli_job import call
from tests.report.runs import losses, write_run

DEEP = 100_000
ODD_LINES = [
    b"[" * DEEP, b'{"a":' * DEEP, b"\xff\xfe", b"\0", b'{"step": 3, "a": ' + b"9" * 400 + b"}", b'{"step": 3, "a": {}}',
    b'{"step": ' + b"9" * 400 + b', "a": 1}', b'{"step": ' + b"9" * 5000 + b"}", b'{"step": 1e999, "a": 1}',
    b'{"step": true, "a": 1}', b'{"step": -3, "a": 1e308}', b'{"step": 3, "\\ud800": 1}', b'{"step": 3, "a": Infinity}',
    b'{"step": 3, "text": "\\ud800\\u0000"}', b'{"step": 3, "text": [5]}', b'{"step": 3, "": null}', b'{"step": 3}',
]  # fmt: skip
ODD_TOML = [
    b"a = " + b"[" * DEEP,
    b"a = " + b"9" * 5000,
    b"a = " + b"{a=" * DEEP,
    b"\xff",
    b"a = 1979-02-30",
    b"[",
    b"a",
]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", losses(range(9), float), config="[model]\ndim = 64\n", samples=[(4, "abc")])


def _spoilt(good, chance, count):
    """The content cut, or with a byte changed."""
    for _ in range(count):
        at = chance.randrange(len(good))
        yield good[:at]
        yield good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_report_of_damaged_lines_shows_the_others(run, name):
    file = run / name
    good = file.read_bytes()
    lines = [good + line + b"\n" + good for line in ODD_LINES]
    for content in [*lines, *_spoilt(good, random.Random(0), 20), b""]:
        file.write_bytes(content)
        status, _, said = call("report", run, "--out", run / "report.html")
        assert status == 0, (content[-200:], said)
    file.write_bytes(lines[0])
    assert call("report", run, "--out", run / "report.html")[0] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "abc" in page and "8 at 8" in page


@pytest.mark.parametrize("command", ["report", "plan"])
def test_a_damaged_config_of_a_run_is_refused_by_its_file(run, command):
    file = run / "config.toml"
    argv = ["report", run, "--out", run / "report.html"] if command == "report" else ["plan", "--config", file]
    good, refused = file.read_bytes(), 0
    for content in [*ODD_TOML, *_spoilt(good, random.Random(0), 20 if command == "report" else 4)]:
        file.write_bytes(content)
        status, _, said = call(*argv)
        if status == 0 and content not in ODD_TOML:
            continue  # a sound config after all
        assert status == 2 and said.count("\n") == 1 and said.startswith(f"error: {file}: "), (content[:80], said)
        refused += 1
    assert refused >= len(ODD_TOML) + 3


def _changed(tree, chance):
    """A JSON document with one of its values another, or gone."""
    tree = json.loads(tree)
    node = tree
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not (isinstance(node[key], (dict, list)) and node[key] and chance.random() < 0.8):
            break
        node = node[key]
    if chance.random() < 0.2:
        del node[key]
    else:
        node[key] = chance.choice([None, 5, -1, 1e300, 2**40, "x", "\0", [], {}, True])
    return json.dumps(tree).encode()


def _tokenizer():
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["<|endoftext|>"], show_progress=False)
    inner.train_from_iterator(["one two three " * 30], trainer)
    return inner.to_str().encode()


def test_a_damaged_tokenizer_is_refused_by_its_file(tmp_path):
    file, good, chance, refused = tmp_path / "tokenizer.json", _tokenizer(), random.Random(0), 0
    changed = [_changed(good, chance) for _ in range(200)]
    for content in [b"", b"[" * DEEP, b"\xff", b"{}", b"null", *changed, *_spoilt(good, chance, 50)]:
        file.write_bytes(content)
        try:
            tokenizer = JsonTokenizer(file)
            tokenizer.decode(tokenizer.encode("one two"))
        except DataError as error:
            assert str(error).startswith(f"{file}: ") and "\n" not in str(error)
            refused += 1
    assert refused >= 150
