"""Files of numbers, mapped into memory only while they are read."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from forge.errors import DataError

MAPS_KEPT = 256
"""Files that stay mapped: each holds a file descriptor, of which a process may have 1024, and a corpus more files."""


class Numbers(Protocol):
    """A row of numbers: an array, or `Mapped`."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        """Some of them."""


@frozen
class Mapped:
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
        """Some of them, as a view of the file.

        Raises:
            DataError: the file is gone, or shorter than it was.
        """
        return _map(self)[index]

    def part(self, start: int, length: int) -> Mapped:
        """The numbers start .. start + length - 1, as a row of their own."""
        return evolve(self, offset=self.offset + start * self.dtype.itemsize, length=length)


def map_file(path: Path, dtype: np.dtype[Any], offset: int, length: int) -> Mapped:
    """A row of numbers in a file that is large enough."""
    stat = path.stat()
    return Mapped(path, dtype, offset, length, (stat.st_ino, stat.st_mtime_ns))


@lru_cache(MAPS_KEPT)
def _map(numbers: Mapped) -> NDArray[Any]:
    if not numbers.length:
        return np.empty(0, numbers.dtype)
    try:
        return np.memmap(numbers.path, numbers.dtype, "r", numbers.offset, (numbers.length,))
    except (OSError, ValueError) as error:
        raise DataError(f"{numbers.path}: gone or cut short since it was opened ({error})") from error
