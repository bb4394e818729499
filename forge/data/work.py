"""The folder in which another one is made: held by one process, kept by one that is killed, and renamed at the end.

`.NAME.work/` lies beside NAME and holds `lock`, `progress.json` (once there is something to go on from) and `folder/`,
which becomes NAME.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs
import cattrs
from attrs import frozen

from forge.data.manifest import FileEntry, Split, write_json
from forge.data.writer import Partial
from forge.files import parse_json, sync_folder
from forge.logging import get_logger

_LOCK, _PROGRESS, _FOLDER = "lock", "progress.json", "folder"
_log = get_logger(__name__)


@frozen
class Journal:
    """How far the work is."""

    recipe: str  # fingerprint of what decides the result, but the text
    source: str  # and of the text that was read
    place: tuple[int, int]  # where reading goes on
    files: dict[str, FileEntry]  # finished
    partials: dict[Split, Partial]  # being written


@frozen
class Work:
    """A held work folder."""

    path: Path
    target: Path  # the folder that is made

    @property
    def folder(self) -> Path:
        """What will be renamed."""
        return self.path / _FOLDER

    def read_journal(self) -> Journal | None:
        """How far an earlier process came; None where it wrote nothing down."""
        try:
            return cattrs.structure(parse_json((self.path / _PROGRESS).read_text(encoding="utf-8")), Journal)
        except FileNotFoundError:
            return None
        except (ValueError, cattrs.BaseValidationError):
            _log.warning("%s: damaged; the work starts again", self.path / _PROGRESS)
            return None

    def write_journal(self, journal: Journal) -> None:
        """Note how far the work is, at once or not at all; the files themselves must be on the disk."""
        scratch = self.path / f"{_PROGRESS}.tmp"
        write_json(scratch, attrs.asdict(journal))
        sync_folder(self.folder)
        scratch.replace(self.path / _PROGRESS)
        sync_folder(self.path)

    def restart(self) -> None:
        """Forget all earlier work."""
        (self.path / _PROGRESS).unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()

    def publish(self) -> None:
        """Give the folder its name, which nothing may have but an empty folder."""
        sync_folder(self.folder)
        self.folder.rename(self.target)
        sync_folder(self.target.parent)
        (self.path / _PROGRESS).unlink(missing_ok=True)


@contextmanager
def work_folder(target: Path) -> Iterator[Work]:
    """Hold the work folder of `target`; waits for a process that holds it.

    Afterwards it is gone, unless the work did not end and a journal tells how to go on. The kernel lets go of the
    lock when a process dies.
    """
    target = target.resolve()
    path = target.with_name(f".{target.name}.work")
    lock = _lock(path)
    try:
        yield Work(path, target)
    finally:
        if (path / _PROGRESS).exists():
            _log.info("%s: not finished; the same command goes on from there", target)
        else:
            _remove(path)
        os.close(lock)


def _lock(path: Path) -> int:
    """Make and lock a work folder."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT)
        except (FileNotFoundError, FileExistsError):  # its holder has just removed the folder
            if path.is_file() or not path.parent.is_dir():
                raise
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("%s: another process is at work there; waiting for it", path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path / _LOCK)):
                return lock
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a held folder, its lock last: whoever makes a new one finds nothing of the old."""
    shutil.rmtree(path / _FOLDER, ignore_errors=True)
    for name in (f"{_PROGRESS}.tmp", _LOCK):
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):  # another process has already made its lock in it
        path.rmdir()
