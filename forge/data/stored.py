"""Rows of numbers in files, read where they are asked for.

They are not mapped into memory: where a file is cut short under a mapping, the next read kills the process by SIGBUS.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from forge.errors import DataError

FILES_KEPT = 256
"""Files that stay open: each holds a file descriptor, of which a process may have 1024, and a corpus more files."""


class Numbers(Protocol):
    """A row of numbers: an array, or `Stored`."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        """Some of them."""


@frozen
class Stored:
    """A row of numbers in a file."""

    path: Path
    dtype: np.dtype[Any]
    offset: int  # bytes before the first
    length: int
    stamp: tuple[int, int]  # inode and time of change: a file that takes this one's place is another

    def __len__(self) -> int:
        """How many."""
        return self.length

    def __getitem__(self, index: slice) -> NDArray[Any]:
        """Some of them, one after the other, read now.

        Raises:
            DataError: the file is gone, or shorter than it was.
            OSError: the disk cannot read it.
        """
        start, stop, step = index.indices(self.length)
        assert step == 1
        n_bytes = max(0, stop - start) * self.dtype.itemsize
        content = _read(self, self.offset + start * self.dtype.itemsize, n_bytes) if n_bytes else b""
        return np.frombuffer(content, self.dtype)

    def part(self, start: int, length: int) -> Stored:
        """The numbers start .. start + length - 1, as a row of their own."""
        return evolve(self, offset=self.offset + start * self.dtype.itemsize, length=length)


def stored_in(path: Path, dtype: np.dtype[Any], offset: int, length: int) -> Stored:
    """A row of numbers in a file that is large enough."""
    stat = path.stat()
    return Stored(path, dtype, offset, length, (stat.st_ino, stat.st_mtime_ns))


class _OpenFile:
    """A descriptor that is closed with the last reader: another thread may read while the file leaves the cache."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # it could be opened
            os.close(self.descriptor)


@lru_cache(FILES_KEPT)
def _open(path: Path, stamp: tuple[int, int]) -> _OpenFile:
    try:
        return _OpenFile(path)
    except OSError as error:
        raise DataError(f"{path}: gone since it was opened ({error.strerror})") from error


def _read(numbers: Stored, offset: int, n_bytes: int) -> bytes:
    file = _open(numbers.path, numbers.stamp)
    content = os.pread(file.descriptor, n_bytes, offset)
    while len(content) < n_bytes:  # the system reads at most 2 GiB at once
        more = os.pread(file.descriptor, n_bytes - len(content), offset + len(content))
        if not more:
            raise DataError(
                f"{numbers.path}: cut short since it was opened: it ends before byte {offset + n_bytes}; put it back as"
                " it was, then start again"
            )
        content += more
    return content
