"""Each document becomes its tokens and its end, on its side of the split."""

from __future__ import annotations

import unittest.mock

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import ByteTokenizer, encode
from forge.data.documents import Document, is_held_out
from forge.data.encode import encode_chunk, encode_documents, encode_only
from forge.data.records import Rows
from forge.data.sources import Chunk
from forge.errors import DataError

BYTES = ByteTokenizer()


@settings(deadline=None)
@given(
    texts=st.lists(st.text(max_size=9)), fraction=st.sampled_from([0, 0.3, 0.5]), piece=st.sampled_from([1, 4, 1 << 24])
)
def test_a_chunk_is_its_documents_by_their_names_in_pieces_of_any_length(texts, fraction, piece):
    with unittest.mock.patch.object(encode, "PIECE", piece):
        _check_chunk(texts, fraction)


def _check_chunk(texts, fraction):
    encoded = encode_chunk(Chunk(Rows("f", "f", 4, tuple(texts), "text"), (1, 2), 3), BYTES, fraction)
    for side, held_out in ((encoded.train, False), (encoded.held_out, True)):
        own = [text for n, text in enumerate(texts, 4) if text and is_held_out(f"f#{n}", fraction) == held_out]
        assert side.tokens.tolist() == [token for text in own for token in [*BYTES.encode(text), 256]]
        assert side.lengths.tolist() == [len(BYTES.encode(text)) + 1 for text in own]
        assert side.n_bytes.tolist() == [len(text.encode(errors="replace")) for text in own]
        assert side.tokens.dtype == np.uint16
    assert (encoded.end, encoded.done, encoded.left_out) == ((1, 2), 3, ())


def test_a_document_that_is_the_only_one_is_cut():
    train, held_out = encode_only(Document("a", "é" * 8), BYTES, 0.25)
    assert (BYTES.decode(train.tokens), BYTES.decode(held_out.tokens)) == ("é" * 6, "é" * 2)
    train, held_out = encode_only(Document("a", "x"), BYTES, 0.25)
    assert train.tokens.tolist() == [120, 256] and held_out.tokens.tolist() == []


def test_a_tokenizer_that_gives_ids_beyond_its_vocabulary_is_named_with_the_document():
    @frozen
    class Wide:
        name: str = "wide"
        vocab_size: int = 100
        eod_id: int = 99

        def encode(self, text):
            return np.array([1, 100])

    with pytest.raises(DataError, match=r"b\.txt: token 1 of the document has id 100, outside the vocabulary of 100"):
        encode_documents([Document("b.txt", "x")], Wide())
