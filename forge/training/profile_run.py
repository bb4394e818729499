"""`profile_run(config, steps)`: a few warm steps of a run under the profiler; nothing of the run itself is touched."""

from __future__ import annotations

from contextlib import ExitStack, closing, suppress
from pathlib import Path

from attrs import evolve

from forge.config import JobConfig, ProfilingConfig
from forge.metrics import DeviceMemoryMonitor
from forge.metrics.timeline import DATA, Timeline, read_timeline, span
from forge.training.data_pipeline import open_data, open_feed
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.profiling import profile_window, trace_path
from forge.training.runtime import deterministic_kernels, open_runtime

WARMUP = 3
"""Steps before the window: compilation, the allocator's growth, kernels that are chosen by trying."""


def profile_run(config: JobConfig, steps: int) -> tuple[Path, Timeline] | None:
    """Take steps from the initial state, and record `steps` warm ones into `<run-dir>/profile`.

    With CUDA the allocator's history of all of them goes beside the trace. Checkpoints, metrics and whatever else the
    run folder holds are neither read nor written.

    Returns:
        The trace and where its time went; None on every rank but 0.

    Raises:
        ForgeError: a mistake in config or data, or the trace cannot be written.
    """
    window = ProfilingConfig(start_step=WARMUP + 1, steps=steps)
    config = evolve(config, profiling=window)  # what is compiled stays readable in a trace
    folder, last = Path(config.run_dir) / "profile", WARMUP + steps
    trace = trace_path(folder, WARMUP + 1, last)
    with suppress(OSError):
        trace.unlink()  # of an earlier profile: where this one cannot be written, it is not taken for it
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config))
        stack.enter_context(deterministic_kernels(config.train.deterministic))
        data = open_data(config, runtime)
        memory = DeviceMemoryMonitor(runtime.device, last, str(folder))
        parts = build_parts(config, runtime)
        state, step_at = initial_state(config, parts), step_for(config, parts)
        feed = open_feed(data, config.data, 0, last, pin=runtime.device.type == "cuda")
        batches = stack.enter_context(closing(feed))
        with profile_window(window, folder) as before_step:
            for step in range(last):
                before_step(step + 1)
                with span(DATA):
                    batch = next(batches).to(runtime.device)
                train_step, state = step_at(step, state)
                state, _ = train_step(state, batch)
        memory.report(last)
        if not runtime.leads:
            return None
    return trace, read_timeline(trace)
