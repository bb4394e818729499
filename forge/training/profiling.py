"""A window of steps under torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from forge.config import ProfilingConfig
from forge.logging import get_logger, process_rank, several_processes
from forge.metrics.timeline import STEP

log = get_logger(__name__)


@contextmanager
def profile_window(config: ProfilingConfig, folder: Path) -> Generator[Callable[[int], None], None, None]:
    """Yield a function to call with the number of each step before it is taken.

    Steps `start_step` .. `start_step + steps - 1` are recorded into `trace_path(folder, a, b)`, which chrome://tracing,
    Perfetto and `cli.py profile --trace` read. A run that begins or ends within the window records what there is of it;
    one that cannot write says so and goes on.
    """
    window = range(config.start_step, config.start_step + config.steps)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    running: profile | None = None
    mark: record_function | None = None  # of the step that is being taken
    recorded: list[int] = []

    def before_step(step: int) -> None:
        nonlocal running, mark
        if step not in window:
            stop()
            return
        if running is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what earlier steps have launched is none
            running = profile(activities=activities)
            running.start()
        if mark is not None:
            mark.__exit__(None, None, None)
        mark = record_function(STEP)
        mark.__enter__()
        recorded.append(step)

    def stop() -> None:
        nonlocal running, mark
        if running is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what the last step has launched is a part of it
            if mark is not None:
                mark.__exit__(None, None, None)
                mark = None
            running.stop()
            _export(running, folder, recorded[0], recorded[-1])
            running = None

    try:
        yield before_step
    finally:
        stop()


def _export(recording: profile, folder: Path, first: int, last: int) -> None:
    path = trace_path(folder, first, last)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        log.warning("%s: the profile cannot be written (%s)", path, error)
        return
    log.info("profile of steps %d to %d: %s", first, last, path)


def trace_path(folder: Path, first: int, last: int) -> Path:
    """The file of a window of steps; of several processes each has its own."""
    rank = f"_rank_{process_rank()}" if several_processes() else ""
    return folder / f"steps_{first}_{last}{rank}.json"
