"""Token files: a header that says what they hold, the tokens, and where each document ends.

Layout, little-endian: 64 bytes of header, `n_tokens` tokens of uint16 or uint32, `n_documents` ends as uint64 (the
index of the token after each end-of-document token).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from forge.data.stored import Numbers, stored_in
from forge.errors import DataError

FORMAT_VERSION = 1

MAGIC = b"FORGETOK"
_HEADER = struct.Struct("<8sII5Q8x")  # magic, version, bytes a token, vocabulary, eod, tokens, documents, bytes of text
HEADER_BYTES = _HEADER.size
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_RAW_DTYPES = {"uint16": _DTYPES[2], "uint32": _DTYPES[4]}


@frozen
class Shard:
    """One token file: opening costs nothing, reading costs what is read."""

    path: Path
    tokens: Numbers = field(eq=False, repr=False)  # (n_tokens,) integers
    doc_ends: Numbers = field(eq=False, repr=False)  # (n_documents,) uint64; empty where not recorded
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
        ids = np.asarray(self.tokens[start:stop])
        if ids.size and (ids.max() >= self.vocab_size or (ids.dtype.kind == "i" and ids.min() < 0)):
            at = int(np.argmax((ids >= self.vocab_size) | (ids < 0)))
            raise DataError(
                f"{self.path}: the token at offset {start + at} has id {ids[at]}, beyond the vocabulary of"
                f" {self.vocab_size}: the file is damaged, of another dtype, or made with another tokenizer"
            )
        return ids.astype(np.int64)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What holds a token of a vocabulary: 16 bits only where it is at most 65,536."""
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


def header(vocab_size: int, eod_id: int, n_tokens: int, n_documents: int, n_bytes: int) -> bytes:
    """The first `HEADER_BYTES` of a token file."""
    width = token_dtype(vocab_size).itemsize
    return _HEADER.pack(MAGIC, FORMAT_VERSION, width, vocab_size, eod_id, n_tokens, n_documents, n_bytes)


def open_shard(path: Path) -> Shard:
    """Open a token file, its header checked against its size.

    Raises:
        DataError: missing, empty, no token file, of another format version, or cut short.
    """
    path, size = Path(path), _size(path)
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if not head.startswith(MAGIC):
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
    tokens = stored_in(path, _DTYPES[width], _HEADER.size, n_tokens)
    ends = stored_in(path, np.dtype("<u8"), expected - n_documents * 8, n_documents)
    return Shard(path, tokens, ends, vocab_size, eod_id, n_bytes)


def open_raw(path: Path, dtype: str, vocab_size: int, eod_id: int) -> Shard:
    """Open a headerless token file, such as nanoGPT's `train.bin`.

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
    tokens = stored_in(path, _RAW_DTYPES[dtype], 0, size // width)
    return Shard(path, tokens, np.empty(0, np.uint64), vocab_size, eod_id, 0)


def open_npy(path: Path, vocab_size: int, eod_id: int) -> Shard:
    """Open the tokens of a `.npy` file, rows after one another where it has rows.

    Raises:
        DataError: missing, empty, cut short, or not an array of integers of 16, 32 or 64 bits.
    """
    path, size = Path(path), _size(path)
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(file)
        except ValueError as error:
            raise DataError(f"{path}: not a .npy file, or its header is damaged ({error})") from error
        offset, length = file.tell(), math.prod(shape)
    if dtype.kind not in "iu" or dtype.itemsize == 1 or (fortran_order and len(shape) > 1) or not length:
        raise DataError(
            f"{path}: an array of {dtype}, shape {shape}, is no row of tokens; write it as uint16 or uint32"
        )
    if size != offset + length * dtype.itemsize:
        raise DataError(f"{path}: {size} bytes where its header promises {offset + length * dtype.itemsize}: cut short")
    tokens = stored_in(path, dtype, offset, length)
    return Shard(path, tokens, np.empty(0, np.uint64), vocab_size, eod_id, 0)


def _size(path: Path) -> int:
    """Bytes of a file that exists and is not empty."""
    if not path.is_file():
        raise DataError(f"{path}: no such token file")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the file is empty")
    return size
