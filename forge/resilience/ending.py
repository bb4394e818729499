"""Ending a process that cannot end by itself: its main thread is stuck where no exception reaches it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import forge
from forge.logging import complain, process_rank

FORGE = str(Path(forge.__file__).parent)
LIBRARIES = f"{os.sep}lib{os.sep}python3"  # of Python itself and what is installed
COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"


def end_process(line: str, status: int) -> None:
    """Say the line and leave at once with this exit status; files that are open lose what they have not written."""
    complain(line)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def dump_stacks(folder: Path, also_on_stderr: bool) -> Path:
    """Write where each thread of this process is to `folder/rank_<n>.txt`; a disk that refuses does not stop us."""
    path = folder / f"rank_{process_rank()}.txt"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
    if also_on_stderr:
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.stderr)
    return path


def place_of(thread: int) -> tuple[str, bool]:
    """Where a thread is, `file:line in function` of our innermost frame, and whether it is in a collective.

    Args:
        thread: its `threading.get_ident()`.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended", False
    stack = traceback.extract_stack(frame)
    shown = next((entry for entry in reversed(stack) if not _in_a_library(entry.filename)), stack[-1])
    path = os.path.relpath(shown.filename) if shown.filename.startswith(os.getcwd() + os.sep) else shown.filename
    return f"{path}:{shown.lineno} in {shown.name}", any(COLLECTIVES in entry.filename for entry in stack)


def _in_a_library(file: str) -> bool:
    return LIBRARIES in file and not file.startswith(FORGE)
