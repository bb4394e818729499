"""What documents are read from, beginning anywhere: files, or a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from forge.data.documents import find_documents, is_json_lines, is_parquet, relative_name, source_root
from forge.data.readers import (
    ROWS_AT_ONCE,
    RUN_BYTES,
    by_size,
    check_column,
    first_line,
    needed,
    read_lines,
    read_parquet,
)
from forge.data.records import JsonLines, Records, Rows, TextFiles
from forge.errors import DataError

HUB = "hf:"

Place = tuple[int, int]
"""Where reading may begin: a file, and a record within it, both from 0."""

Stat = tuple[str, int, int]
"""A file's name below the root, its size, and the time of its last change."""

_FILES_AT_ONCE = 256


@frozen
class Chunk:
    """A run of documents."""

    records: Records
    end: Place  # where the next chunk begins
    done: int  # of the source's total, after this chunk


class Source(Protocol):
    """Documents in a fixed order, read from any place on without holding more than one chunk."""

    @property
    def total(self) -> int:
        """What `Chunk.done` counts up to."""

    @property
    def n_bytes(self) -> int:
        """About how large it is."""

    def chunks(self, start: Place) -> Iterator[Chunk]:
        """Read on from a place.

        Raises:
            DataError: something is damaged; names file and line or row.
        """

    def digest(self, end: Place) -> str:
        """A fingerprint of all before a place: names, sizes and times of the files, not their content."""


@frozen
class Files:
    """Files of text, JSON lines and Parquet, each by its name."""

    files: tuple[Path, ...]
    root: Path
    key: str
    _stats: tuple[Stat, ...] = field(init=False, repr=False)
    _ends: tuple[int, ...] = field(init=False, repr=False)  # bytes before each file, and in all

    @_stats.default
    def _look(self) -> tuple[Stat, ...]:
        return file_stats(self.files, self.root)

    @_ends.default
    def _add_sizes(self) -> tuple[int, ...]:
        return tuple(accumulate((size for _, size, _ in self._stats), initial=0))

    @property
    def total(self) -> int:
        """Bytes."""
        return self._ends[-1]

    @property
    def n_bytes(self) -> int:
        """Bytes, packed where the files are."""
        return self._ends[-1]

    def chunks(self, start: Place) -> Iterator[Chunk]:
        """As `Source`."""
        index, record = start
        while index < len(self.files):
            file = self.files[index]
            if is_json_lines(file):
                yield from self._json_lines(index, record)
            elif is_parquet(file):
                yield from self._parquet(index, record)
            else:
                end = self._end_of_run(index)
                named = tuple((relative_name(file, self.root), file) for file in self.files[index:end])
                yield Chunk(TextFiles(named), (end, 0), self._ends[end])
                index = end - 1
            index, record = index + 1, 0

    def digest(self, end: Place) -> str:
        """As `Source`."""
        return stats_digest(self._stats[: end[0] + (end[1] > 0)])

    def _json_lines(self, index: int, start: int) -> Iterator[Chunk]:
        file = self.files[index]
        name = relative_name(file, self.root)
        for first, lines, read in read_lines(file, start):
            records = JsonLines(file, name, first, tuple(lines), self.key)
            yield Chunk(records, (index, first + len(lines)), self._ends[index] + read)

    def _parquet(self, index: int, start: int) -> Iterator[Chunk]:
        file = self.files[index]
        name, size = relative_name(file, self.root), self._ends[index + 1] - self._ends[index]
        for first, values, share in read_parquet(file, self.key, start):
            records = Rows(str(file), name, first, tuple(values), self.key)
            yield Chunk(records, (index, first + len(values)), self._ends[index] + int(share * size))

    def _end_of_run(self, index: int) -> int:
        """The end of the run of text files that begins at an index."""
        end = index + 1
        while (
            end < min(len(self.files), index + _FILES_AT_ONCE)
            and self._ends[end] - self._ends[index] < RUN_BYTES
            and not is_json_lines(self.files[end])
            and not is_parquet(self.files[end])
        ):
            end += 1
        return end


@frozen
class Dataset:
    """A dataset of Hugging Face `datasets`."""

    name: str  # for messages
    inner: Any
    key: str

    @property
    def total(self) -> int:
        """Rows."""
        return len(self.inner)

    @property
    def n_bytes(self) -> int:
        """Bytes of all its columns."""
        return int(self.inner.data.nbytes)

    def chunks(self, start: Place) -> Iterator[Chunk]:
        """As `Source`; the file is always 0."""
        column = self.inner.with_format("arrow", columns=[self.key])
        for row in range(start[1], self.total, ROWS_AT_ONCE):
            try:
                values = column[row : row + ROWS_AT_ONCE].column(self.key).to_pylist()
            except (OSError, ValueError) as error:
                raise DataError(f"{self.name}: damaged after row {row} ({first_line(error)})") from error
            for first, run in by_size(row, values):
                end = first + len(run)
                yield Chunk(Rows(self.name, "", first, tuple(run), self.key), (0, end), end)

    def digest(self, end: Place) -> str:
        """Of the whole dataset."""
        return str(self.inner._fingerprint)


def find_source(path: str, key: str) -> Source:
    """What a path stands for.

    Args:
        path: as `find_documents` takes it; or a folder that `datasets` saved; or 'hf:NAME', 'hf:NAME:CONFIG' or
            'hf:NAME:CONFIG:SPLIT', as `datasets.load_dataset` takes them (CONFIG may be empty; SPLIT is 'train' by
            default).
        key: of the text in JSON lines, Parquet and datasets.

    Raises:
        DataError: there is none, or a package is missing.
    """
    if path.startswith(HUB):
        return _dataset(path, _load_named(path), key)
    folder = Path(path).expanduser()
    if is_saved_dataset(folder):
        return _dataset(path, _load_saved(folder), key)
    return Files(tuple(find_documents(path)), source_root(path), key)


def path_digest(path: str, files: Iterable[Path] = ()) -> str:
    """A fingerprint of what a path stands for, without reading it: of place, names, sizes and times.

    A dataset on the hub is fingerprinted by its name alone: to have a newer version, empty the cache.

    Args:
        files: what the path stands for, if it is known.
    """
    if path.startswith(HUB):
        return path
    root = source_root(path)
    saved = (file for file in root.rglob("*") if file.is_file()) if is_saved_dataset(Path(path).expanduser()) else ()
    found = list(files) or sorted(saved) or find_documents(path)
    return f"{root.resolve()} {stats_digest(file_stats(found, root))}"


def file_stats(files: Iterable[Path], root: Path) -> tuple[Stat, ...]:
    """Of each file.

    Raises:
        DataError: one is gone.
    """
    try:
        stats = [(relative_name(file, root), file.stat()) for file in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def stats_digest(stats: Iterable[Stat]) -> str:
    """A fingerprint of files."""
    digest = hashlib.sha256()
    for stat in stats:
        digest.update(json.dumps(stat).encode())
    return digest.hexdigest()


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder is one that `datasets` saved."""
    saved = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return saved or (folder / "dataset_dict.json").is_file()


def _dataset(path: str, loaded: Any, key: str) -> Dataset:
    check_column(path, loaded.column_names, key)
    return Dataset(path, loaded, key)


def _load_saved(folder: Path) -> Any:
    datasets = needed("datasets", str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # of many kinds, as the folder may hold anything
        raise DataError(f"{folder}: a damaged dataset ({first_line(error)})") from error
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded or len(loaded) == 1:
        return loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    raise DataError(f"{folder}: none of its splits ({', '.join(loaded)}) is 'train'; give the folder of one")


def _load_named(path: str) -> Any:
    name, config, split = [*path.removeprefix(HUB).split(":", 2), "", ""][:3]
    datasets = needed("datasets", path)
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # of many kinds: no network, no such dataset, no such split, no such config
        raise DataError(f"{path}: cannot be loaded ({first_line(error)})") from error
