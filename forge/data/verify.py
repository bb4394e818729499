"""Whether token files still hold what their manifest says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from forge.data.manifest import FileEntry, Manifest, read_manifest
from forge.data.raw import digest, open_whole
from forge.data.workers import available_cores
from forge.errors import DataError
from forge.files import file_digest

_BLOCK = 1 << 22  # tokens


def verify(folder: Path, *, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Read every token file of a prepared folder and compare it with the manifest, which is returned.

    Files of forge are compared by their SHA-256; of files that lie elsewhere, every id is checked, and the blocks that
    their digest covers are compared (`forge.data.raw.digest`).

    Args:
        progress: called with (files done, files in all).

    Raises:
        DataError: names every file that is missing or damaged.
    """
    manifest = read_manifest(folder)
    faults = list[str]()
    with ThreadPoolExecutor(min(available_cores(), 16)) as threads:
        found = threads.map(_fault, repeat(Path(folder)), manifest.files, repeat(manifest))
        for done, fault in enumerate(found, 1):
            if fault:
                faults.append(fault)
            if progress:
                progress(done, len(manifest.files))
    if faults:
        raise DataError("; ".join(faults))
    return manifest


def damaged(folder: Path, files: dict[str, FileEntry]) -> str | None:
    """The first of finished files that is not as it was written, None where all are."""
    with ThreadPoolExecutor(min(available_cores(), 16)) as threads:
        for name, sound in zip(files, threads.map(_is_sound, repeat(folder), files.items()), strict=True):
            if not sound:
                return name
    return None


def _is_sound(folder: Path, item: tuple[str, FileEntry]) -> bool:
    name, entry = item
    return (folder / name).is_file() and file_digest(folder / name) == entry.sha256


def _fault(folder: Path, name: str, manifest: Manifest) -> str | None:
    """What is wrong with a file."""
    entry = manifest.files[name]
    try:
        shard = open_whole(folder, name, manifest)
        if entry.file:
            for start in range(0, shard.n_tokens, _BLOCK):
                shard.read(start, min(start + _BLOCK, shard.n_tokens))
        found = digest(shard) if entry.file else file_digest(shard.path)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{folder / name}: cannot be read ({error.strerror})"
    return None if found == entry.sha256 else f"{shard.path}: damaged, its checksum is not the manifest's"
