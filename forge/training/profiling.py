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
    chrome://tracing and Perfetto read. A run that ends within the window keeps what was recorded.
    """
    first, last = config.start_step, config.start_step + config.steps - 1
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    running: profile | None = None

    def stop() -> None:
        nonlocal running
        if running is not None:
            running.stop()
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"steps_{first}_{last}.json"
            running.export_chrome_trace(str(path))
            log.info("profile of steps %d to %d: %s", first, last, path)
            running = None

    def before_step(step: int) -> None:
        nonlocal running
        if running is not None and step > last:
            stop()
        if running is None and config.steps and step == first:
            running = profile(activities=activities)
            running.start()

    try:
        yield before_step
    finally:
        stop()
