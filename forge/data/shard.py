"""Token files: a header that says what they hold, the tokens, and where each document ends.

Layout, little-endian: 64 bytes of header, `n_tokens` tokens of uint16 or uint32, `n_documents` ends as uint64 (the
index of the token after each end-of-document token).
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from forge.errors import DataError

FORMAT_VERSION = 1

_MAGIC = b"FORGETOK"
_HEADER = struct.Struct("<8sII5Q8x")  # magic, version, bytes a token, vocabulary, eod, tokens, documents, bytes of text
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_RAW_DTYPES = {"uint16": _DTYPES[2], "uint32": _DTYPES[4]}


@frozen
class Shard:
    """One token file, mapped into memory: opening costs nothing, reading costs what is read."""

    path: Path
    tokens: NDArray[np.unsignedinteger] = field(eq=False, repr=False)  # (n_tokens,) uint16 or uint32
    doc_ends: NDArray[np.uint64] = field(eq=False, repr=False)  # (n_documents,); empty where not recorded
    vocab_size: int
    eod_id: int
    n_bytes: int  # of the text before tokenisation; 0 = not known

    @property
    def n_tokens(self) -> int:
        """Tokens in the file, ends of documents included."""
        return len(self.tokens)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens start .. stop - 1 as int64 (stop - start,).

        Raises:
            DataError: an id is not below the vocabulary; names file, offset and id.
            IndexError: the range is not within the file.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.path}, which holds {self.n_tokens}")
        ids = self.tokens[start:stop].astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"{self.path}: the token at offset {start + at} has id {ids[at]}, beyond the vocabulary of"
                f" {self.vocab_size}: the file is damaged, of another dtype, or made with another tokenizer"
            )
        return ids


def write_shard(
    path: Path, documents: Iterable[NDArray[np.int64]], *, vocab_size: int, eod_id: int, n_bytes: int = 0
) -> Shard:
    """Write documents, each followed by `eod_id`, one at a time; the file appears whole or not at all.

    Args:
        documents: ids of one document each, (n,); an empty one is left out, an `eod_id` inside ends a document too.
        vocab_size: every id is below it; tokens take 16 bits only where it is at most 65,536.
        n_bytes: UTF-8 bytes of the text, 0 = not known.

    Raises:
        DataError: an id outside the vocabulary, or no document at all.
    """
    width = 2 if vocab_size <= 1 << 16 else 4
    with _published(path) as file:
        file.write(bytes(_HEADER.size))
        n_tokens, ends = 0, array("Q")
        for index, document in enumerate(documents):
            if document.size == 0:
                continue
            _check_document(path, index, document, vocab_size)
            ids = np.append(document, eod_id)
            ends.extend((np.flatnonzero(ids == eod_id) + n_tokens + 1).tolist())
            n_tokens += ids.size
            file.write(ids.astype(_DTYPES[width]).tobytes())
        if n_tokens == 0:
            raise DataError(f"{path}: nothing to write, every document is empty")
        file.write(np.frombuffer(ends, dtype=np.uint64).astype("<u8").tobytes())
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, FORMAT_VERSION, width, vocab_size, eod_id, n_tokens, len(ends), n_bytes))
    return open_shard(path)


def open_shard(path: Path) -> Shard:
    """Map a token file, its header checked against its size.

    Raises:
        DataError: missing, empty, no token file, of another format version, or cut short.
    """
    path, size = Path(path), _size(path)
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(_MAGIC):
        raise DataError(f"{path}: not a forge token file; make one with `cli.py prepare`")
    if len(head) < _HEADER.size:
        raise DataError(f"{path}: cut short within its header; prepare the data again")
    _, version, width, vocab_size, eod_id, n_tokens, n_documents, n_bytes = _HEADER.unpack(head)
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: format version {version}, this forge reads {FORMAT_VERSION}; prepare the data again")
    if width not in _DTYPES or eod_id >= vocab_size or n_tokens == 0 or (width == 2 and vocab_size > 1 << 16):
        raise DataError(f"{path}: its header is damaged; prepare the data again")
    expected = _HEADER.size + n_tokens * width + n_documents * 8
    if size != expected:
        what = "cut short" if size < expected else "damaged"
        raise DataError(f"{path}: {size} bytes where its header promises {expected}: {what}; prepare the data again")
    tokens = np.memmap(path, dtype=_DTYPES[width], mode="r", offset=_HEADER.size, shape=(n_tokens,))
    ends: NDArray[np.uint64] = np.empty(0, np.uint64)
    if n_documents:
        ends = np.memmap(path, dtype="<u8", mode="r", offset=expected - n_documents * 8, shape=(n_documents,))
    return Shard(path, tokens, ends, vocab_size, eod_id, n_bytes)


def open_raw(path: Path, dtype: str, vocab_size: int, eod_id: int) -> Shard:
    """Map a headerless token file, such as nanoGPT's `train.bin`.

    Args:
        dtype: 'uint16' or 'uint32', as the file was written; it cannot be told from the size.

    Raises:
        DataError: missing, empty, cut in the middle of a token, or a dtype too narrow for the vocabulary.
    """
    path = Path(path)
    if dtype not in _RAW_DTYPES:
        raise DataError(f"{path}: dtype must be uint16 or uint32, got {dtype!r}")
    if dtype == "uint16" and vocab_size > 1 << 16:
        raise DataError(f"{path}: uint16 tokens cannot hold a vocabulary of {vocab_size}; write the file as uint32")
    if not 0 <= eod_id < vocab_size:
        raise DataError(f"{path}: the end-of-document id {eod_id} is beyond the vocabulary of {vocab_size}")
    size, width = _size(path), _RAW_DTYPES[dtype].itemsize
    if size % width:
        raise DataError(f"{path}: {size} bytes are no whole number of {dtype} tokens: cut short, or of another dtype")
    tokens = np.memmap(path, dtype=_RAW_DTYPES[dtype], mode="r")
    return Shard(path, tokens, np.empty(0, np.uint64), vocab_size, eod_id, 0)


def _size(path: Path) -> int:
    """Bytes of a file that exists and is not empty."""
    if not path.is_file():
        raise DataError(f"{path}: no such token file")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the file is empty")
    return size


def _check_document(path: Path, index: int, ids: NDArray[np.int64], vocab_size: int) -> None:
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(np.argmax(bad))
        raise DataError(
            f"{path}: token {at} of document {index} has id {ids[at]}, outside the vocabulary of {vocab_size}:"
            " the tokenizer states too small a vocab_size"
        )


@contextmanager
def _published(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name, synced and renamed once all went well."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
