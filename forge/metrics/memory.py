"""Memory of a device: a GPU's allocator, or the process and the machine on a CPU. GB is GiB, 2^30 bytes."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from forge.errors import RunError
from forge.logging import get_logger, process_rank

GIB = 2**30

Device = torch.device | int | str
"""A number is a CUDA device, or the CPU on a machine without CUDA."""

_logger = get_logger(__name__)


def get_memory_stats(device: Device = 0) -> dict[str, float]:
    """`allocated_gb`, `peak_gb` since the last reset, `reserved_gb` and `total_gb`, in GiB.

    On a CPU: what the process holds in memory, the most it held, the same as reserved, and the machine's memory.

    Raises:
        RunError: the device is not there.
    """
    place = _resolve(device)
    if place.type == "cpu":
        held, peak = _process_memory()
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        sizes = (held, peak, held, total)
    else:
        sizes = (
            torch.cuda.memory_allocated(place),
            torch.cuda.max_memory_allocated(place),
            torch.cuda.memory_reserved(place),
            torch.cuda.get_device_properties(place).total_memory,
        )
    return dict(zip(("allocated_gb", "peak_gb", "reserved_gb", "total_gb"), (s / GIB for s in sizes), strict=True))


def reset_peak_memory(device: Device = 0) -> None:
    """Let the peak start again from what is held now; a CPU's needs Linux to permit it and stays otherwise."""
    place = _resolve(device)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): reset VmHWM
    except OSError:
        return


def get_memory_utilization(device: Device = 0) -> float:
    """Peak over total memory, 0 to 1."""
    return memory_utilization(get_memory_stats(device))


def memory_utilization(stats: dict[str, float]) -> float:
    """Peak over total memory of `get_memory_stats`, 0 to 1."""
    return stats["peak_gb"] / stats["total_gb"] if stats["total_gb"] else 0.0


def format_memory_stats(device: Device = 0) -> str:
    """`allocated 1.2GB, peak 3.4GB, reserved 4.0GB of 80.0GB (4%)`."""
    stats = get_memory_stats(device)
    return (
        f"allocated {stats['allocated_gb']:.1f}GB, peak {stats['peak_gb']:.1f}GB,"
        f" reserved {stats['reserved_gb']:.1f}GB of {stats['total_gb']:.1f}GB ({memory_utilization(stats):.0%})"
    )


class DeviceMemoryMonitor:
    """Memory by interval: each report starts a new peak. Also takes one snapshot of a CUDA allocator's history.

    Args:
        device: what is watched.
        snapshot_step: the snapshot is taken at the first report at or after this step; None = never. The history is
            recorded from construction on.
        snapshot_dir: folder of the snapshot.
    """

    def __init__(
        self, device: Device = 0, snapshot_step: int | None = None, snapshot_dir: str = "memory_snapshots"
    ) -> None:
        self._device = _resolve(device)
        self._snapshot_step = snapshot_step
        self._snapshot_dir = Path(snapshot_dir)
        if snapshot_step is not None and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)  # the host's memory, too, ends

    def report(self, step: int) -> dict[str, float]:
        """`get_memory_stats` of the interval since the last report."""
        stats = get_memory_stats(self._device)
        reset_peak_memory(self._device)
        if self._snapshot_step is not None and step >= self._snapshot_step:
            self._snapshot_step = None
            self.capture_snapshot(step)
        return stats

    def capture_snapshot(self, step: int) -> str | None:
        """Write the allocator's history for pytorch.org/memory_viz and stop recording it.

        Returns:
            The file's path; None on a CPU, or where it could not be written (the log says why).
        """
        if self._device.type != "cuda":
            return None
        path = self._snapshot_dir / f"memory_step_{step:08d}_rank_{process_rank()}.pickle"
        try:
            self._snapshot_dir.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            _logger.warning("no memory snapshot at step %d: %s: %s", step, path, error)
            return None
        return str(path)


def _resolve(device: Device) -> torch.device:
    if isinstance(device, int) and not torch.cuda.is_available():
        return torch.device("cpu")
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise RunError(f"no device {place}: this machine has {torch.cuda.device_count()} CUDA devices")
    return place if place.type == "cuda" else torch.device("cpu")


def _process_memory() -> tuple[int, int]:
    """Bytes that the process holds in memory, and the most that it held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak, peak  # no /proc: only the peak is known
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    held = sizes.get("VmRSS", peak)
    return held, max(held, sizes.get("VmHWM", peak))
