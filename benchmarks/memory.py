"""Peak memory of one side, in a process of its own: `python -m benchmarks.memory` reads a question from stdin."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import attrs

from benchmarks.apart import ROOT, environment
from benchmarks.regimes import Device, Regime, timed_precision
from benchmarks.sides import SIDES
from forge.errors import RunError
from forge.metrics import get_memory_stats, reset_peak_memory

STEPS = 3
GIB = 2**30


_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc keeps what is freed unless told otherwise (mallopt(3)), up to half of a small peak, and by no rule of size."""


def peak_memory(regime: Regime, side: str, device: Device, *, give_back: bool = False) -> float:
    """Bytes at the peak of a few updates, less what was held just before the model was built.

    Resident memory of the process on a CPU, the allocator's on CUDA.

    Args:
        side: a name in `SIDES`.
        give_back: freed memory goes to the system at once, so that the peak is what was in use. Slower; the default is
            what a user's process would hold.

    Raises:
        RunError: the process failed.
    """
    question = json.dumps({"regime": attrs.asdict(regime), "side": side, "device": device})
    command = [sys.executable, "-m", "benchmarks.memory"]
    env = environment(side) | (_GIVE_BACK if give_back else {})
    done = subprocess.run(command, input=question, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RunError(f"{regime.name}: the memory of {side} could not be measured: {last}")
    return float(done.stdout.strip().splitlines()[-1])


def measure_here(regime: Regime, side: str, device: Device) -> float:
    """`peak_memory` in this process, which must not have trained before."""
    build, precision = SIDES[side], timed_precision(device)
    # A small twin first: code that is loaded at the first use, and libraries' own buffers, count for neither side.
    twin = build(attrs.evolve(regime, vocab_size=64, dim=32, n_layers=1, n_heads=2, seq_len=8), device, precision, None)
    twin.step()
    del twin
    gc.collect()
    before = get_memory_stats(device)["allocated_gb"]
    runner = build(regime, device, precision, None)
    gc.collect()
    reset_peak_memory(device)
    for _ in range(STEPS):
        float(runner.step())
    return (get_memory_stats(device)["peak_gb"] - before) * GIB


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(measure_here(Regime(**asked["regime"]), asked["side"], asked["device"]))
