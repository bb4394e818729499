"""Documents: which files hold them, and on which side of the train/held-out split each one falls."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from attrs import frozen

from forge.errors import DataError

STDLIB = "stdlib"
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst", ".json.gz", ".json.zst")

_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@frozen
class Document:
    """A text, and the name that decides its side of the split."""

    name: str
    text: str


def is_json_lines(file: Path) -> bool:
    """By its name. `.json` alone is text: mostly one value over many lines."""
    return file.name.lower().endswith(_JSON_LINES)


def is_parquet(file: Path) -> bool:
    """By its name."""
    return file.name.lower().endswith(".parquet")


def find_documents(path: str) -> list[Path]:
    """The files of documents that a path stands for, sorted by their name below `source_root`.

    Args:
        path: 'stdlib' (the sources of this Python's standard library, without tests), a file, a folder (its text, JSON
            lines and Parquet files, hidden ones left out, recursively), or a glob (`**` spans folders).

    Raises:
        DataError: there is none.
    """
    root, given = source_root(path), Path(path).expanduser()
    if path == STDLIB:
        found = [file for file in _walk(root, _NOT_STDLIB.__contains__) if file.suffix == ".py"]
    elif given.is_dir():
        found = [file for file in _walk(root, is_hidden) if is_json_lines(file) or is_parquet(file) or _is_text(file)]
    elif given.is_file():
        found = [given]
    elif given.exists():
        raise DataError(f"{path}: neither a file nor a folder; write its text to a file, and give that")
    else:
        found = matches(path)
    if not found:
        what = "no text file in this folder" if given.is_dir() else "no such file or folder, and no glob that matches"
        raise DataError(
            f"{path}: {what}; data.path is a file, a folder or a glob of text, JSON lines, Parquet or tokens, 'hf:' and"
            " a dataset's name, a prepared folder, or 'stdlib'"
        )
    return sorted(found, key=lambda file: relative_name(file, root))


def matches(path: str) -> list[Path]:
    """The files that a glob matches."""
    return [Path(name) for name in glob.glob(str(Path(path).expanduser()), recursive=True) if os.path.isfile(name)]


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


def is_held_out(name: str, eval_fraction: float) -> bool:
    """The side of a document, by a hash of its name: whatever the order, the machine, and the other documents."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48 < eval_fraction


def cut(text: str, eval_fraction: float) -> tuple[str, str]:
    """(train, held out) of a text that is the only one; each has a character where there are two."""
    if eval_fraction == 0 or len(text) < 2:
        return text, ""
    at = min(max(1, round(len(text) * (1 - eval_fraction))), len(text) - 1)
    return text[:at], text[at:]


def is_hidden(name: str) -> bool:
    """Whether a folder's file or folder of this name is left out."""
    return name.startswith(".") or name == "__pycache__"


def _is_text(file: Path) -> bool:
    """Git's rule: a file with a zero byte among its first 8000 is not text."""
    return b"\0" not in read_bytes(file, 8000)


def read_bytes(file: Path, limit: int = -1) -> bytes:
    """The content of a file, or its beginning.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            return opened.read(limit)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _walk(root: Path, left_out: Callable[[str], bool]) -> Iterator[Path]:
    """Files below a folder, without entering folders or taking files whose name is left out."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not left_out(name)]
        files = (Path(folder, name) for name in names if not left_out(name))
        yield from (file for file in files if file.is_file())
