"""A window of steps under torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from forge.config import ProfilingConfig
from forge.logging import get_logger

log = get_logger(__name__)


@contextmanager
def profile_window(config: ProfilingConfig, folder: Path) -> Generator[Callable[[int], None], None, None]:
    """Yield a function to call with the number of each step before it is taken.

    Steps `start_step` .. `start_step + steps - 1` are recorded into `folder/steps_<a>_<b>.json`, which
    chrome://tracing and Perfetto read. A run that begins or ends within the window records what there is of it; one
    that cannot write says so and goes on.
    """
    window = range(config.start_step, config.start_step + config.steps)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    running: profile | None = None
    recorded: list[int] = []

    def before_step(step: int) -> None:
        nonlocal running
        if step in window:
            if running is None:
                running = profile(activities=activities)
                running.start()
            recorded.append(step)
        elif running is not None:
            stop()

    def stop() -> None:
        nonlocal running
        if running is not None:
            running.stop()
            _export(running, folder, recorded[0], recorded[-1])
            running = None

    try:
        yield before_step
    finally:
        stop()


def _export(recording: profile, folder: Path, first: int, last: int) -> None:
    path = folder / f"steps_{first}_{last}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        log.warning("%s: the profile cannot be written (%s)", path, error)
        return
    log.info("profile of steps %d to %d: %s", first, last, path)
