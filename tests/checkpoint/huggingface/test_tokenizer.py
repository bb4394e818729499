"""The tokenizer goes with the model: files are copied with their settings, bytes become a tokenizer.json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.checkpoint.huggingface.tokenizer import copy_tokenizer, write_tokenizer
from forge.data import build_tokenizer
from forge.errors import CheckpointError
from tests.checkpoint.huggingface import peers


@pytest.fixture(scope="module")
def bytes_written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    assert write_tokenizer(build_tokenizer("bytes"), folder, 16) == (None, 256)
    return build_tokenizer(str(folder / "tokenizer.json"))


@given(text=st.text())
def test_bytes_as_a_tokenizer_json_give_the_same_ids(bytes_written, text):
    ours = build_tokenizer("bytes")
    assert bytes_written.encode(text).tolist() == ours.encode(text).tolist()
    assert bytes_written.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert (bytes_written.vocab_size, bytes_written.eod_id) == (ours.vocab_size, ours.eod_id)


def test_a_tokenizer_json_goes_with_the_settings_beside_it(tmp_path):
    (tmp_path / "data").mkdir()
    peers.write_tokenizer(tmp_path / "data")
    (tmp_path / "out").mkdir()
    special = write_tokenizer(build_tokenizer(str(tmp_path / "data/tokenizer.json")), tmp_path / "out", 16)
    assert special == (27, 28)  # <s> and </s>
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "data" / name).read_bytes()


def test_without_settings_such_are_written_as_suffice(tmp_path):
    (tmp_path / "data").mkdir()
    peers.write_tokenizer(tmp_path / "data")
    (tmp_path / "data/tokenizer_config.json").unlink()
    (tmp_path / "data/tokenizer.json").rename(tmp_path / "data/mine.json")
    (tmp_path / "out").mkdir()
    special = write_tokenizer(build_tokenizer(str(tmp_path / "data/mine.json")), tmp_path / "out", 16)
    assert special == (None, 28)
    settings = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["model_max_length"]) == ("</s>", 16)
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("ab").input_ids == [0, 1] and loaded.eos_token_id == 28


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_settings_are_one_line(tmp_path, content):
    (tmp_path / "data").mkdir()
    peers.write_tokenizer(tmp_path / "data")
    (tmp_path / "data/tokenizer_config.json").write_text(content)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: damaged"):
        write_tokenizer(build_tokenizer(str(tmp_path / "data/tokenizer.json")), tmp_path / "out", 16)


def test_a_tokenizer_that_is_not_there_cannot_be_copied(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be copied"):
        copy_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out")
