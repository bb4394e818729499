"""Text survives the way to ids and back, and a tokenizer that cannot end a document is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from forge.data import ByteTokenizer, JsonTokenizer, build_tokenizer
from forge.errors import DataError


def _save(path, vocab=None, special=("<|endoftext|>",)):
    inner = Inner(models.WordLevel(vocab or {"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        inner.add_special_tokens(list(special))
    inner.save(str(path))
    return path


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_give_back_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod_id]) == text


@settings(deadline=None)
@given(st.lists(st.integers(-5, 400)))
def test_any_ids_that_a_model_can_produce_decode_without_an_error(ids):
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_bytes_are_their_own_ids_and_the_end_of_a_document_is_256():
    tokenizer = build_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod_id) == ("bytes", 257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode([195, 256, 300]) == "\ufffd"


def test_a_lone_surrogate_from_the_command_line_is_encoded_rather_than_fatal():
    assert ByteTokenizer().encode("a\udc80").tolist() == [97, ord("?")]


def test_a_json_tokenizer_encodes_decodes_and_knows_its_end_of_document(tmp_path):
    path = _save(tmp_path / "tokenizer.json")
    tokenizer = build_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.name) == (4, 3, str(path))
    ids = tokenizer.encode("a b a")
    assert ids.tolist() == [0, 1, 0] and ids.dtype == np.int64
    assert tokenizer.decode([*ids, 3, 99, -1]) == "a b a"
    assert tokenizer.encode("").tolist() == []


def test_a_text_that_spells_the_end_of_a_document_does_not_end_it(tmp_path):
    tokenizer = build_tokenizer(str(_save(tmp_path / "tokenizer.json")))
    assert tokenizer.encode("a <|endoftext|> b").tolist() == [0, 2, 1]


def test_the_vocabulary_covers_the_highest_id_when_ids_have_gaps(tmp_path):
    tokenizer = JsonTokenizer(_save(tmp_path / "t.json", {"a": 0, "[UNK]": 70000, "</s>": 12}, special=()))
    assert tokenizer.vocab_size == 70001 and tokenizer.eod_id == 12


@pytest.mark.parametrize("special", ["</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"])
def test_the_usual_names_of_the_end_of_a_document_are_found(tmp_path, special):
    tokenizer = JsonTokenizer(_save(tmp_path / "t.json", special=(special,)))
    assert tokenizer.eod_id == 3


def _no_end(path):
    _save(path, special=())


def _no_json(path):
    path.write_text("{ not json\n")


def _other_json(path):
    path.write_text(json.dumps({"model": 3}))


@pytest.mark.parametrize("make", [_no_end, _no_json, _other_json, lambda path: None])
def test_a_file_that_is_no_usable_tokenizer_is_one_line_that_names_it(tmp_path, make):
    path = tmp_path / "tokenizer.json"
    make(path)
    with pytest.raises(DataError) as caught:
        build_tokenizer(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_sent_to_another_process_encodes_the_same(tmp_path):
    tokenizer = build_tokenizer(str(_save(tmp_path / "tokenizer.json")))
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert sent == tokenizer
    assert sent.encode("a <|endoftext|> b").tolist() == tokenizer.encode("a <|endoftext|> b").tolist() == [0, 2, 1]


def test_a_lone_surrogate_of_a_json_file_is_encoded_rather_than_fatal(tmp_path):
    assert build_tokenizer(str(_save(tmp_path / "tokenizer.json"))).encode("a \ud800 b").tolist() == [0, 2, 1]
