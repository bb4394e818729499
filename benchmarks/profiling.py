"""Where the time of one forge step goes."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import forge_runner
from benchmarks.regimes import Device, Regime, timed_precision

WARMUP, ROWS = 3, 20


def profile_step(regime: Regime, device: Device) -> str:
    """The operators of one warm step by their own time, as a table."""
    runner = forge_runner(regime, device, timed_precision(device))
    for _ in range(WARMUP):
        float(runner.step())
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as recorded:
        float(runner.step())
    averages = recorded.key_averages()
    return averages.table(sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=60)
