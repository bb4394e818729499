"""Where the time of one forge step goes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import evolve

from benchmarks.peers import batches, forge_step
from benchmarks.regimes import Device, Regime, job_config, timed_precision
from forge.config import ProfilingConfig
from forge.metrics.timeline import format_timeline, read_timeline
from forge.training.profiling import profile_window

WARMUP, ROWS = 3, 20


def profile_step(regime: Regime, device: Device) -> str:
    """Time by kind of one warm step, and its operators by their own time."""
    window = ProfilingConfig(start_step=WARMUP + 1, steps=1)
    config = evolve(job_config(regime, device, timed_precision(device)), profiling=window)
    take = forge_step(config, batches(regime, device))
    with TemporaryDirectory() as folder:
        with profile_window(window, Path(folder)) as before_step:
            for step in range(WARMUP + 1):
                before_step(step + 1)
                float(take())
        (trace,) = Path(folder).iterdir()
        return format_timeline(read_timeline(trace), rows=ROWS)
