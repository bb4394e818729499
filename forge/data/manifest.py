"""`manifest.json`: what a prepared folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs
from attrs import frozen

from forge.errors import DataError
from forge.files import parse_json, sync_file

MANIFEST = "manifest.json"

Split = Literal["train", "eval"]


@frozen
class FileEntry:
    """One token file."""

    split: Split
    tokens: int
    documents: int
    bytes: int  # of text; 0 = not known
    sha256: str  # of the file; where it is one of `raw`, what `forge.data.raw.digest` says
    file: str = ""  # where it is, if not in the folder under its name
    raw: str = ""  # what kind of file, if not one of forge's own: 'uint16', 'uint32' or 'npy'
    start: int = 0  # the first of its tokens that is taken


@frozen
class Manifest:
    """Everything about a prepared folder but the tokens."""

    source: str
    tokenizer: str  # what `build_tokenizer` takes
    vocab_size: int
    eod_id: int
    eval_fraction: float
    files: dict[str, FileEntry]  # by name within the folder, in the order of their tokens

    def of(self, split: Split) -> dict[str, FileEntry]:
        """The token files of a split, in order."""
        return {name: entry for name, entry in self.files.items() if entry.split == split}


def is_prepared(folder: Path) -> bool:
    """Whether a folder is one that `prepare` made."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        DataError: the folder has none, or one that cannot be read.
    """
    file = Path(folder) / MANIFEST
    if not file.is_file():
        raise DataError(f"{folder}: not a prepared folder, it has no {MANIFEST}; make one with `cli.py prepare`")
    try:
        return cattrs.structure(parse_json(file.read_text(encoding="utf-8")), Manifest)
    except (OSError, ValueError, cattrs.BaseValidationError) as error:
        raise DataError(f"{file}: damaged ({type(error).__name__}); remove the folder and prepare it again") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder and sync it to the disk."""
    write_json(folder / MANIFEST, attrs.asdict(manifest))


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a file of JSON and sync it to the disk."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    sync_file(file)
