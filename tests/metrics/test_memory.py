"""Memory of the process and of a (pretended) GPU."""

from __future__ import annotations

import os

import pytest
import torch

from forge.errors import RunError
from forge.metrics import (
    DeviceMemoryMonitor,
    format_memory_stats,
    get_memory_stats,
    get_memory_utilization,
    memory,
    reset_peak_memory,
)

KEYS = ["allocated_gb", "peak_gb", "reserved_gb", "total_gb"]


def _fill(gib: float) -> bytearray:
    return bytearray(b"\x01" * int(gib * 2**30))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_reports_the_process_and_the_machine(device):
    stats = get_memory_stats(device)
    assert list(stats) == KEYS
    assert 0.01 < stats["allocated_gb"] <= stats["peak_gb"] < stats["total_gb"]
    assert stats["total_gb"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 0 < get_memory_utilization(device) < 1


def test_resident_memory_follows_what_the_process_holds():
    before = get_memory_stats("cpu")["allocated_gb"]
    held = _fill(0.1)
    assert get_memory_stats("cpu")["allocated_gb"] - before == pytest.approx(0.1, abs=0.03)
    del held


def _peak_can_be_reset() -> bool:
    return os.access("/proc/self/clear_refs", os.W_OK)


@pytest.mark.skipif(not _peak_can_be_reset(), reason="the kernel does not let the peak be reset")
def test_each_report_has_the_peak_of_its_own_interval():
    monitor = DeviceMemoryMonitor("cpu")
    monitor.report(1)
    held = _fill(0.2)
    del held
    high, low = monitor.report(2), monitor.report(3)
    assert high["peak_gb"] - high["allocated_gb"] > 0.15
    assert low["peak_gb"] - low["allocated_gb"] < 0.05


def test_a_peak_that_may_not_be_reset_stays(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(memory.Path, "write_text", refuse)
    peak = get_memory_stats("cpu")["peak_gb"]
    reset_peak_memory("cpu")
    assert get_memory_stats("cpu")["peak_gb"] >= peak


def test_without_proc_the_peak_stands_for_both(monkeypatch):
    monkeypatch.setattr(memory.Path, "read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    stats = get_memory_stats("cpu")
    assert stats["allocated_gb"] == stats["peak_gb"] > 0.01


def test_memory_in_words_names_all_four():
    words = format_memory_stats("cpu")
    assert all(word in words for word in ("allocated", "peak", "reserved", "of", "%"))


def test_a_snapshot_is_for_cuda_only(tmp_path):
    monitor = DeviceMemoryMonitor("cpu", snapshot_step=1, snapshot_dir=str(tmp_path / "snapshots"))
    assert list(monitor.report(1)) == KEYS
    assert monitor.capture_snapshot(1) is None
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(RunError, match="cuda:97"):
        get_memory_stats("cuda:97")


class _PretendedGPU:
    total_memory = 80 * 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device 0 that records what it is asked."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _PretendedGPU)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(("reset", device)))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **kw: asked.append(("record", kw)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(("dump", path)))
    return asked


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_a_gpu_reports_its_allocator_in_gib(gpu, device):
    assert list(get_memory_stats(device).values()) == [1.0, 20.0, 3.0, 80.0]
    assert get_memory_utilization(device) == 0.25
    assert format_memory_stats(device) == "allocated 1.0GB, peak 20.0GB, reserved 3.0GB of 80.0GB (25%)"


def test_a_gpu_report_starts_a_new_peak(gpu):
    DeviceMemoryMonitor(0).report(1)
    assert gpu == [("reset", torch.device("cuda", 0))]


def test_one_snapshot_is_taken_at_the_first_report_from_its_step_on(gpu, tmp_path):
    monitor = DeviceMemoryMonitor(0, snapshot_step=15, snapshot_dir=str(tmp_path / "snapshots"))
    for step in (10, 20, 30):
        monitor.report(step)
    path = str(tmp_path / "snapshots" / "memory_step_00000020_rank_0.pickle")
    assert [entry for entry in gpu if entry[0] != "reset"] == [
        ("record", {"max_entries": 100_000}),
        ("dump", path),
        ("record", {"enabled": None}),
    ]


def test_a_snapshot_that_cannot_be_written_costs_a_warning_and_not_the_run(gpu, tmp_path):
    (tmp_path / "file").touch()
    assert DeviceMemoryMonitor(0, snapshot_dir=str(tmp_path / "file")).capture_snapshot(3) is None
