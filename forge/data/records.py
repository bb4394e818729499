"""Runs of documents as their files hold them: cheap to read in one process, and parsed in another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from forge.data.documents import Document, read_bytes
from forge.errors import DataError

Warn = Callable[[str], None]
"""Called with what is left out, and why."""


class Records(Protocol):
    """Documents that are not parsed yet."""

    def documents(self, warn: Warn) -> Iterator[Document]:
        """Parse them, in order; some may be empty.

        Raises:
            DataError: one is damaged; names file and line or row.
        """


@frozen
class TextFiles:
    """Files that are a document each; read by whoever parses them."""

    files: tuple[tuple[str, Path], ...]  # with their names below the root

    def documents(self, warn: Warn) -> Iterator[Document]:
        """As `Records`; a file that is not UTF-8 is left out."""
        for name, file in self.files:
            try:
                yield Document(name, read_bytes(file).decode("utf-8"))
            except UnicodeDecodeError as error:
                warn(f"{file}: not UTF-8 (byte {error.start}), left out")


@frozen
class JsonLines:
    """Lines of a file, a JSON object each; blank ones hold no document, but count."""

    file: Path
    name: str  # below the root
    first: int  # number of the first line here, from 0
    lines: tuple[bytes, ...]
    key: str

    def documents(self, warn: Warn) -> Iterator[Document]:
        """As `Records`."""
        for index, line in enumerate(self.lines, self.first):
            if line.strip():
                where = f"{self.file}: line {index + 1}"
                yield Document(f"{self.name}#{index}", _text_of(_parsed(line, where), self.key, where))


@frozen
class Rows:
    """Values of a column of text."""

    file: str  # or dataset, for messages
    name: str  # below the root
    first: int  # number of the first row here, from 0
    values: tuple[Any, ...]
    key: str

    def documents(self, warn: Warn) -> Iterator[Document]:
        """As `Records`."""
        for index, value in enumerate(self.values, self.first):
            where = f"{self.file}: row {index + 1}"
            yield Document(f"{self.name}#{index}", _checked(value, self.key, where))


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError as error:
        raise DataError(f"{where}: not JSON that can be read (nested too deeply)") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    except ValueError as error:  # a number of too many digits
        raise DataError(f"{where}: not JSON that can be read ({error})") from error


def _text_of(value: Any, key: str, where: str) -> str:
    if not isinstance(value, dict):
        raise DataError(f"{where}: {_kind(value)} where a JSON object is wanted, one a line")
    if key not in value:
        there = ", ".join(sorted(value)[:8]) or "none"
        raise DataError(f"{where}: no key {key!r} (it has: {there}); name the one of the text by text_key")
    return _checked(value[key], key, where)


def _checked(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {_kind(value)}, not text; name the key of the text by text_key")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
