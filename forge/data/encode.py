"""Text -> tokens, a chunk at a time, each document to its side of the split."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from forge.data.documents import Document, cut, is_held_out
from forge.data.shard import token_dtype
from forge.data.sources import Chunk, Place
from forge.data.tokenizer import BYTES, Tokenizer
from forge.errors import DataError

PIECE = 1 << 24
"""Characters of a long text that are encoded at a time."""


@frozen
class Documents:
    """Tokenised documents, end to end."""

    tokens: NDArray[np.unsignedinteger] = field(eq=False)  # (n,), each document followed by its end
    lengths: NDArray[np.int64] = field(eq=False)  # (documents,) tokens of each, its end included
    n_bytes: NDArray[np.int64] = field(eq=False)  # (documents,) UTF-8 bytes of text of each


@frozen
class Encoded:
    """The documents of a chunk."""

    train: Documents
    held_out: Documents
    left_out: tuple[str, ...]  # a message for each file
    end: Place  # as in `Chunk`
    done: int


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, eval_fraction: float) -> Encoded:
    """Parse and tokenise the documents of a chunk.

    Raises:
        DataError: a document is damaged, or the tokenizer gives ids beyond its vocabulary.
    """
    train, held_out, left_out = list[Document](), list[Document](), list[str]()
    for document in chunk.records.documents(left_out.append):
        (held_out if is_held_out(document.name, eval_fraction) else train).append(document)
    sides = encode_documents(train, tokenizer), encode_documents(held_out, tokenizer)
    return Encoded(*sides, tuple(left_out), chunk.end, chunk.done)


def encode_only(document: Document, tokenizer: Tokenizer, eval_fraction: float) -> tuple[Documents, Documents]:
    """(train, held out) of a document that is the only one: its text is cut."""
    left, right = (Document(document.name, text) for text in cut(document.text, eval_fraction))
    return encode_documents([left], tokenizer), encode_documents([right], tokenizer)


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Documents:
    """Tokenise documents; those without a token are left out.

    Raises:
        DataError: the tokenizer gives ids beyond its vocabulary.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    tokens, n_bytes = list[NDArray[np.unsignedinteger]](), list[int]()
    for document in documents:
        ids, size = _encoded(document, tokenizer, dtype)
        if ids.size:
            tokens.append(ids)
            n_bytes.append(size)
    lengths = np.array([part.size for part in tokens], np.int64)
    together = tokens[0] if len(tokens) == 1 else np.concatenate([np.empty(0, dtype), *tokens])
    return Documents(together, lengths, np.array(n_bytes, np.int64))


def _encoded(
    document: Document, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger]
) -> tuple[NDArray[np.unsignedinteger], int]:
    """The ids of a document and its end, none where it has none; and the UTF-8 bytes of its text.

    Where every character stands for itself a long text is encoded in pieces: its ids are eight times as large.
    """
    text, pieces, n_bytes = document.text, list[NDArray[np.unsignedinteger]](), 0
    length = PIECE if tokenizer.name == BYTES else max(1, len(text))
    for start in range(0, len(text), length):
        piece = text[start : start + length]
        ids = tokenizer.encode(piece)
        check_ids(document.name, "the document", ids, tokenizer.vocab_size)
        pieces.append(ids.astype(dtype))
        n_bytes += len(piece.encode("utf-8", errors="replace"))
    if any(piece.size for piece in pieces):
        pieces.append(np.array([tokenizer.eod_id], dtype))
    return np.concatenate([np.empty(0, dtype), *pieces]), n_bytes


def check_ids(where: str, what: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary: they would wrap where they are stored.

    Raises:
        DataError: names the first one and its place.
    """
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad))
        raise DataError(
            f"{where}: token {at} of {what} has id {ids[at]}, outside the vocabulary of {vocab_size}: the tokenizer"
            " states too small a vocab_size"
        )
