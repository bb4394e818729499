"""Text documents: which files they are, and on which side of the train/held-out split each one falls."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from attrs import frozen

from forge.errors import DataError
from forge.logging import get_logger

STDLIB = "stdlib"

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_WHOLE = slice(None)
_log = get_logger(__name__)


@frozen
class Document:
    """A text file, or the part of one: what one end-of-document token follows."""

    path: Path
    n_bytes: int  # of this part in UTF-8
    part: slice = _WHOLE  # in characters

    def text(self) -> str:
        """The text, read now.

        Raises:
            DataError: the file is gone, or no longer UTF-8.
        """
        try:
            return _read_text(self.path)[self.part]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: changed while it was prepared; start again") from error


def find_documents(path: str) -> list[Path]:
    """The text files that a path stands for, sorted by their name below `source_root`.

    Args:
        path: 'stdlib' (the sources of this Python's standard library, without tests), a file, a folder (its text files,
            hidden ones left out, recursively), or a glob (`**` spans folders).

    Raises:
        DataError: there is none.
    """
    root, given = source_root(path), Path(path).expanduser()
    if path == STDLIB:
        found = [file for file in _walk(root, _NOT_STDLIB.__contains__) if file.suffix == ".py"]
    elif given.is_dir():
        found = [file for file in _walk(root, _is_hidden) if _is_text(file)]
    elif given.exists():
        found = [given]
    else:
        found = [Path(name) for name in glob.glob(str(given), recursive=True) if os.path.isfile(name)]
    if not found:
        what = "no text file in this folder" if given.is_dir() else "no such file or folder, and no glob that matches"
        raise DataError(f"{path}: {what}; data.path is text, a folder or glob of text, a prepared folder, or 'stdlib'")
    return sorted(found, key=lambda file: relative_name(file, root))


def source_root(path: str) -> Path:
    """The folder that document names are relative to: the same names on any machine."""
    if path == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    given = Path(path).expanduser()
    if given.is_dir():
        return given
    if given.exists():
        return given.parent
    return Path(*takewhile(lambda part: not set(part) & set("*?["), given.parts[:-1]))


def relative_name(file: Path, root: Path) -> str:
    """The name of a file below the root, with forward slashes."""
    return Path(os.path.relpath(file, root)).as_posix()


def readable_documents(files: Sequence[Path]) -> list[Document]:
    """The files that hold UTF-8 text, as whole documents; empty ones are left out, others with one warning each."""
    documents = []
    for file in files:
        try:
            n_bytes = len(_read_text(file).encode())
        except UnicodeDecodeError as error:
            _log.warning("%s: not UTF-8 (byte %d), left out", file, error.start)
            continue
        if n_bytes:
            documents.append(Document(file, n_bytes))
    return documents


def split_documents(
    documents: Sequence[Document], root: Path, eval_fraction: float
) -> tuple[list[Document], list[Document]]:
    """(train, held out), by a hash of each document's name: whatever the order, the machine, and the other documents.

    Both sides get at least one document where there are two; a single document is cut, its end held out.

    Args:
        eval_fraction: share of the documents held out; 0 = none.
    """
    if eval_fraction == 0:
        return list(documents), []
    if len(documents) == 1:
        return _cut(documents[0], eval_fraction)
    places = [_place(relative_name(document.path, root)) for document in documents]
    # At least the lowest place is held out, and never the highest.
    limit = min(max(eval_fraction, min(places) + 2**-48), max(places))
    train = [document for document, place in zip(documents, places, strict=True) if place >= limit]
    return train, [document for document, place in zip(documents, places, strict=True) if place < limit]


def _place(name: str) -> float:
    """A name's place in [0, 1), uniform over names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little") / 2**48


def _cut(document: Document, eval_fraction: float) -> tuple[list[Document], list[Document]]:
    text = document.text()
    if len(text) < 2:
        return [document], []
    at = min(max(1, round(len(text) * (1 - eval_fraction))), len(text) - 1)
    n_bytes = len(text[:at].encode())
    train = Document(document.path, n_bytes, slice(0, at))
    return [train], [Document(document.path, document.n_bytes - n_bytes, slice(at, None))]


def _walk(root: Path, left_out: Callable[[str], bool]) -> Iterator[Path]:
    """Files below a folder, without entering folders or taking files whose name is left out."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not left_out(name)]
        files = (Path(folder, name) for name in names if not left_out(name))
        yield from (file for file in files if file.is_file())


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_text(file: Path) -> bool:
    """Git's rule: a file with a zero byte among its first 8000 is not text."""
    return b"\0" not in _read(file, 8000)


def _read_text(file: Path) -> str:
    return _read(file).decode("utf-8")


def _read(file: Path, limit: int = -1) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(limit)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
