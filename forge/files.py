"""Files that are on the disk whole or not at all, whatever is killed or loses its power meanwhile; and JSON in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_ASIDE = ".rewritten"
"""Where new content waits; not under its file's name, since TensorBoard reads all that have "tfevents" in theirs."""


def replace_file(path: Path, content: bytes) -> None:
    """Put the content in the file's place: a kill leaves the old one or the new one. One process writes in the folder.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    aside = path.with_name(_ASIDE)
    try:
        aside.write_bytes(content)
        sync_file(aside)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: a rename is durable only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """`json.loads`, for which nesting that Python's stack does not reach is damage like any other.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text, strict=strict)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def step_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, object) of every whole line of a run's JSON-lines file; a kill or a full disk may have cut one off.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                continue
            step = line.get("step") if isinstance(line, dict) else None
            if isinstance(step, int):
                yield step, line
