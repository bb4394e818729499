"""Files of many documents, read in runs from any record on: JSON lines, plain or packed, and Parquet."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from forge.errors import DataError

RUN_BYTES = 1 << 20
"""About what a run holds: enough to be worth sending to another process, and little enough to hold many."""

ROWS_AT_ONCE = 256


def needed(module: str, reader: str) -> Any:
    """An optional package.

    Raises:
        DataError: it is not installed; says for what it is needed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{reader}: reading it needs the package {package}: pip install {package}") from error


def read_lines(file: Path, start: int) -> Iterator[tuple[int, list[bytes], int]]:
    """Runs of lines from line `start` on: (number of the first, the lines, bytes of the file read so far).

    Raises:
        DataError: the file cannot be read or unpacked; names the line.
    """
    number, size, run = 0, 0, list[bytes]()
    with _opened(file) as (raw, lines):
        try:
            for line in lines:
                number += 1
                if number <= start:
                    continue
                run.append(line)
                size += len(line)
                if size >= RUN_BYTES:
                    yield number - len(run), run, raw.tell()
                    size, run = 0, []
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: damaged or cut short after line {number} ({error})") from error
        if run:
            yield number - len(run), run, raw.tell()


@contextmanager
def _opened(file: Path) -> Iterator[tuple[IO[bytes], Iterable[bytes]]]:
    """(the file, the lines in it)."""
    try:
        raw = file.open("rb")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    with raw:
        if file.suffix.lower() == ".gz":
            yield raw, io.BufferedReader(gzip.GzipFile(fileobj=raw), RUN_BYTES)
        elif file.suffix.lower() == ".zst":
            yield raw, io.BufferedReader(_Blocks(_zstd_blocks(raw, needed("zstandard", str(file)))), RUN_BYTES)
        else:
            yield raw, raw


def _zstd_blocks(raw: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """What zstd frames hold; unlike the package's own reader, it tells a cut frame from a whole one."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # of `zstd --long=31`, as large dumps use
    frame = decompressor.decompressobj()
    try:
        while block := raw.read(1 << 17):
            while block:
                if frame.eof:
                    frame = decompressor.decompressobj()
                yield frame.decompress(block)
                block = frame.unused_data
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if not frame.eof:
        raise EOFError("the last zstd frame has no end")


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; 0 at the end."""
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        n = min(len(buffer), len(self._left))
        buffer[:n], self._left = self._left[:n], self._left[n:]
        return n


def read_parquet(file: Path, key: str, start: int) -> Iterator[tuple[int, list[Any], float]]:
    """Runs of a column's values from row `start` on: (number of the first, the values, share of the file read so far).

    Raises:
        DataError: no Parquet file, no such column, or damaged; names the row.
    """
    parquet = needed("pyarrow.parquet", str(file))
    errors = (OSError, ValueError, needed("pyarrow", str(file)).ArrowException)
    try:
        opened = parquet.ParquetFile(file)
    except errors as error:
        raise DataError(f"{file}: not a Parquet file, or damaged ({first_line(error)})") from error
    with opened:
        check_column(str(file), opened.schema_arrow.names, key)
        counts = [opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)]
        row, groups = 0, list(range(len(counts)))
        while groups and row + counts[groups[0]] <= start:
            row += counts[groups.pop(0)]
        try:
            for batch in opened.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[key]):
                values = batch.column(0)[max(0, start - row) :].to_pylist()
                row += len(batch)
                for first, run in by_size(row - len(values), values):
                    yield first, run, (first + len(run)) / sum(counts)
        except errors as error:
            raise DataError(f"{file}: damaged after row {row} ({first_line(error)})") from error


def check_column(where: str, columns: Iterable[str], key: str) -> None:
    """Refuse a table without the column of the text.

    Raises:
        DataError: names the columns that there are.
    """
    if key not in columns:
        there = ", ".join(list(columns)[:8]) or "none"
        raise DataError(f"{where}: no column {key!r} (it has: {there}); name the one of the text by text_key")


def by_size(first: int, values: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Values in runs of about `RUN_BYTES`, with the number of each run's first."""
    run, size = list[Any](), 0
    for value in values:
        run.append(value)
        size += len(value) if isinstance(value, str) else 0
        if size >= RUN_BYTES:
            yield first, run
            first, run, size = first + len(run), [], 0
    if run:
        yield first, run


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the error's kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
