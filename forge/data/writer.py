"""Writing token files: one, and the row of them that holds a split."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from forge.data.encode import Documents, check_ids
from forge.data.manifest import FileEntry, Split
from forge.data.shard import HEADER_BYTES, Shard, header, open_shard, token_dtype
from forge.errors import DataError
from forge.files import file_digest

_BLOCK = 1 << 20  # tokens


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
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with closing(ShardWriter(scratch, vocab_size, eod_id)) as writer:
            for index, document in enumerate(documents):
                if document.size:
                    check_ids(str(path), f"document {index}", document, vocab_size)
                    writer.append(np.append(document, eod_id).astype(writer.dtype), 0, 0)
            if not writer.n_tokens:
                raise DataError(f"{path}: nothing to write, every document is empty")
            writer.n_bytes = n_bytes
            writer.finish()
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return open_shard(path)


@frozen
class Partial:
    """How far a token file was written: enough to go on, and to see whether it still is so."""

    tokens: int
    bytes: int  # of text
    last_bytes: int  # of the text of the last document
    sha256: str  # of the tokens


class ShardWriter:
    """A token file in the making; it is none before `finish`."""

    def __init__(self, path: Path, vocab_size: int, eod_id: int, partial: Partial | None = None) -> None:
        """Begin an empty file, or go on with one.

        Raises:
            DataError: the file to go on with does not hold what it did.
        """
        self.path, self.vocab_size, self.eod_id, self.dtype = path, vocab_size, eod_id, token_dtype(vocab_size)
        self.n_tokens = self.n_bytes = self._last_bytes = 0
        self._ends, self._sha256 = array("Q"), hashlib.sha256()
        self._file = path.open("r+b" if partial else "w+b")
        self._file.seek(HEADER_BYTES)
        if partial:
            self._take_up(partial)

    def close(self) -> None:
        """Let go of the file, finished or not."""
        self._file.close()

    @property
    def n_documents(self) -> int:
        """Documents so far."""
        return len(self._ends)

    def append(self, tokens: NDArray[np.unsignedinteger], n_bytes: int, last_bytes: int) -> None:
        """Add whole documents, each followed by its end; `n_bytes` of text, of which the last has `last_bytes`."""
        self._count(tokens)
        self._file.write(tokens.data)
        self.n_bytes, self._last_bytes = self.n_bytes + n_bytes, last_bytes

    def take_last(self) -> tuple[NDArray[np.unsignedinteger], int]:
        """Take the last document out again, once: its tokens, and its bytes of text."""
        self._ends.pop()
        self.n_tokens, self.n_bytes = self._ends[-1] if self._ends else 0, self.n_bytes - self._last_bytes
        start = HEADER_BYTES + self.n_tokens * self.dtype.itemsize
        self._file.seek(start)
        tokens = np.frombuffer(self._file.read(), self.dtype)
        self._file.seek(start)
        self._file.truncate()
        return tokens, self._last_bytes

    def sync(self) -> Partial:
        """Bring all to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return Partial(self.n_tokens, self.n_bytes, self._last_bytes, self._sha256.hexdigest())

    def finish(self) -> None:
        """Make it a token file, on the disk."""
        self._file.write(np.frombuffer(self._ends, dtype=np.uint64).astype("<u8").data)
        self._file.seek(0)
        self._file.write(header(self.vocab_size, self.eod_id, self.n_tokens, self.n_documents, self.n_bytes))
        self.sync()

    def _take_up(self, partial: Partial) -> None:
        while block := self._file.read(min(_BLOCK, partial.tokens - self.n_tokens) * self.dtype.itemsize):
            if len(block) % self.dtype.itemsize:
                break
            self._count(np.frombuffer(block, self.dtype))
        if (self.n_tokens, self._sha256.hexdigest()) != (partial.tokens, partial.sha256):
            raise DataError(f"{self.path}: no longer what was written there")
        self._file.truncate(HEADER_BYTES + self.n_tokens * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)
        self.n_bytes, self._last_bytes = partial.bytes, partial.last_bytes

    def _count(self, tokens: NDArray[np.unsignedinteger]) -> None:
        self._ends.extend((np.flatnonzero(tokens == self.eod_id) + self.n_tokens + 1).tolist())
        self.n_tokens += tokens.size
        self._sha256.update(tokens.data)


class SplitWriter:
    """The token files of a split: each of at most `shard_tokens` tokens, or of one document that is longer."""

    def __init__(self, folder: Path, split: Split, *, vocab_size: int, eod_id: int, shard_tokens: int) -> None:
        self.files = dict[str, FileEntry]()  # the finished ones
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._vocab_size, self._eod_id = vocab_size, eod_id
        self._open: ShardWriter | None = None

    @property
    def n_documents(self) -> int:
        """Documents so far."""
        open_ones = self._open.n_documents if self._open else 0
        return open_ones + sum(entry.documents for entry in self.files.values())

    def take_up(self, files: Mapping[str, FileEntry], partial: Partial | None) -> None:
        """Go on after finished files, and with the one that was being written.

        Raises:
            DataError: that one does not hold what it did, or is gone.
        """
        self.files.update(files)
        if partial is not None:
            if not self._path().is_file():
                raise DataError(f"{self._path()}: gone")
            self._open = ShardWriter(self._path(), self._vocab_size, self._eod_id, partial)

    def add(self, documents: Documents) -> None:
        """Write documents; files that have no room for the next one are finished."""
        ends, start = np.cumsum(documents.lengths), 0
        while start < len(ends):
            offset = int(ends[start - 1]) if start else 0
            writer = self._open or self._begin()
            room = self._shard_tokens - writer.n_tokens
            stop = int(np.searchsorted(ends, offset + room, side="right"))
            if stop <= start and writer.n_tokens:
                self._finish(writer)
                continue
            stop = max(stop, start + 1)
            n_bytes = documents.n_bytes[start:stop]
            writer.append(documents.tokens[offset : ends[stop - 1]], int(n_bytes.sum()), int(n_bytes[-1]))
            start = stop

    def take_last(self) -> Documents:
        """Take the last document out again."""
        assert self._open is not None  # a file is finished only for a document after it
        tokens, n_bytes = self._open.take_last()
        if not self._open.n_documents:
            self.close()
            self._path().unlink()
        return Documents(tokens, np.array([tokens.size]), np.array([n_bytes]))

    def sync(self) -> Partial | None:
        """Bring the file that is being written, if there is one, to the disk."""
        return self._open.sync() if self._open else None

    def finish(self) -> dict[str, FileEntry]:
        """Finish the last file; all of them."""
        if self._open:
            self._finish(self._open)
        return self.files

    def close(self) -> None:
        """Let go of the file that is being written, finished or not."""
        if self._open:
            self._open.close()
        self._open = None

    def _begin(self) -> ShardWriter:
        self._open = ShardWriter(self._path(), self._vocab_size, self._eod_id)
        return self._open

    def _finish(self, writer: ShardWriter) -> None:
        writer.finish()
        self.close()
        digest = file_digest(writer.path)
        entry = FileEntry(self._split, writer.n_tokens, writer.n_documents, writer.n_bytes, digest)
        self.files[writer.path.name] = entry

    def _path(self) -> Path:
        """Of the file after the finished ones."""
        return self._folder / f"{self._split}-{len(self.files):05d}.bin"
