"""`manifest.json`: what a prepared folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import attrs
import cattrs
from attrs import frozen

from forge.errors import DataError

MANIFEST = "manifest.json"

Split = Literal["train", "eval"]


@frozen
class FileEntry:
    """One token file."""

    split: Split
    tokens: int
    documents: int
    bytes: int  # of text
    sha256: str


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
        return cattrs.structure(json.loads(file.read_text(encoding="utf-8")), Manifest)
    except (OSError, ValueError, cattrs.BaseValidationError) as error:
        raise DataError(f"{file}: damaged ({type(error).__name__}); remove the folder and prepare it again") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder and sync it to the disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(attrs.asdict(manifest), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
