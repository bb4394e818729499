"""What the doctor finds: a sound machine passes, each fault is told with its remedy, and nothing is left behind."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from forge import doctor
from forge.doctor import Finding
from tests.cli_job import call

FAST = {"check_gloo": Finding("ok", "gloo"), "check_versions": Finding("ok", "versions")}


@pytest.fixture
def quick(monkeypatch):
    """Without the checks that take seconds."""
    for name, finding in FAST.items():
        monkeypatch.setattr(doctor, name, lambda finding=finding: finding)


def test_a_sound_machine_is_told_so_and_nothing_is_left_behind(tmp_path, quick):
    status, out, err = call("doctor", "--run-dir", tmp_path / "runs" / "x")
    assert (status, err) == (0, "")
    for part in (
        "versions",
        "CPU: ",
        "CUDA",
        "launcher",
        "gloo",
        "disk: ",
        "clock: ",
        "open files: ",
        "shared memory: ",
    ):
        assert part in out
    assert list(tmp_path.iterdir()) == []


def test_what_breaks_a_run_is_status_2(tmp_path, quick, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    status, out, err = call("doctor", "--run-dir", tmp_path)
    assert status == 2 and "BAD  launcher: WORLD_SIZE = 'many'" in out
    assert err.splitlines()[-1].endswith("1 of these would break a run; each line says what to do")


@pytest.mark.slow
def test_two_processes_add_a_number_and_a_wrong_interface_is_told(monkeypatch):
    assert doctor.check_gloo().state == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found = doctor.check_gloo()
    assert found.state == "BAD" and "GLOO_SOCKET_IFNAME" in found.text


def test_old_and_missing_packages_are_named(tmp_path):
    assert doctor.check_versions().state == "ok"
    (tmp_path / "p.toml").write_text(
        '[project]\nrequires-python = ">=3.99"\ndependencies = ["torch>=99.1", "attrs>=22.1", "no-such-package>=1"]\n'
    )
    found = doctor.check_versions(tmp_path / "p.toml")
    assert found.state == "BAD" and "no-such-package is missing (needed: 1 or newer)" in found.text
    assert f"torch {torch.__version__} (needed: 99.1 or newer)" in found.text and "python 3." in found.text
    assert "attrs" not in found.text


def test_versions_are_compared_as_numbers():
    assert doctor._release("2.13.0+cpu") == (2, 13, 0) > doctor._release("2.9")


def test_more_threads_than_cores_are_noted(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert doctor.check_cpu().state == "note" and "OMP_NUM_THREADS=" in doctor.check_cpu().text


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "nvidiactl" or exists(path))
    for built, text in ((None, "this torch has no CUDA"), ("12.8", "its driver must know CUDA 12.8")):
        monkeypatch.setattr(torch.version, "cuda", built)
        found = doctor.check_cuda()
        assert found.state == "BAD" and text in found.text


def test_a_gpu_is_described_and_one_in_use_is_noted(monkeypatch):
    free = [75 * doctor.GIB]
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda index: "H200",
        "mem_get_info": lambda index: (free[0], 80 * doctor.GIB),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    assert doctor.check_cuda().state == "ok" and "H200 (75 of 80 GiB free)" in doctor.check_cuda().text
    free[0] = 10 * doctor.GIB
    assert doctor.check_cuda().state == "note" and "in use by another process" in doctor.check_cuda().text


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    found = doctor.check_disk(tmp_path / "gone", size=doctor.MIB)
    assert found.state == "BAD" and "No such file or directory" in found.text and "--run-dir" in found.text


def test_little_room_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: _Usage)
    assert doctor.check_disk(tmp_path, size=doctor.MIB).state == "note"


class _Usage:
    total, free = 64 * doctor.MIB, 10 * doctor.MIB


def test_a_clock_that_jumps_or_disagrees_with_the_disk_is_noted(tmp_path, monkeypatch):
    assert doctor.check_clock(tmp_path).state == "ok"
    times = iter([100.0, 101.0, 101.0])
    monkeypatch.setattr(doctor.time, "time", lambda: next(times))
    assert "jumps (+0.80 s" in doctor.check_clock(tmp_path).text
    monkeypatch.undo()
    now = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now() - 3600)
    assert "is +3600 s off" in doctor.check_clock(tmp_path).text


@pytest.mark.parametrize(
    ("limit", "state"), [(256, "BAD"), (1024, "ok"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_open_files_are_told(limit, state):
    assert doctor.check_open_files(limit).state == state


def test_little_shared_memory_breaks_a_run_on_several_gpus_only(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: _Usage)
    assert [doctor.check_shared_memory(tmp_path, devices).state for devices in (0, 1, 2)] == ["note", "note", "BAD"]
    assert "64 MiB" in doctor.check_shared_memory(tmp_path, 2).text
    assert doctor.check_shared_memory(tmp_path / "none", 8).state == "BAD"
