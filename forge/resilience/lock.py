"""One process at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from forge.errors import RunError

LOCK = ".lock"


@contextmanager
def lock_run(run_dir: Path) -> Generator[None, None, None]:
    """Hold `run_dir`, made where it is missing, until the end; the kernel lets go when the process dies.

    Raises:
        RunError: the folder cannot be written, or another process holds it.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunError(
            f"{run_dir}: the run folder cannot be written ({error.strerror}): choose another --run-dir"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"{run_dir}: another process is training in it: wait for it, or choose another --run-dir"
        ) from None
    try:
        yield
    finally:
        _remove_unused(made, run_dir)
        os.close(descriptor)


def _remove_unused(made: list[Path], run_dir: Path) -> None:
    """Remove the folders that we made and nothing was written to: a run that was refused leaves no trace."""
    if made and os.listdir(run_dir) == [LOCK]:
        (run_dir / LOCK).unlink()
        for path in made:
            if any(path.iterdir()):
                return
            path.rmdir()
