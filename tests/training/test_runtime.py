"""What a process runs on: `auto` resolved, mistakes named, global settings given back."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from attrs import evolve

from forge.config import DistributedConfig, JobConfig
from forge.errors import ForgeError, RunError
from forge.training.runtime import _device, build_runtime, deterministic_kernels, open_runtime, within
from tests.distributed.ranks import run_ranks
from tests.processes import free_port

JOB = JobConfig()


def _train(**changes):
    return evolve(JOB, train=evolve(JOB.train, **changes))


@pytest.mark.parametrize(
    ("changes", "compute", "stored"),
    [
        ({}, torch.float32, torch.float32),
        ({"precision": "bf16"}, torch.bfloat16, torch.float32),
        ({"precision": "fp32", "param_dtype": "bf16"}, torch.float32, torch.bfloat16),
    ],
)
def test_precision_names_the_dtypes(changes, compute, stored):
    runtime = build_runtime(_train(device="cpu", **changes))
    assert (runtime.device.type, runtime.compute_dtype, runtime.param_dtype) == ("cpu", compute, stored)


def test_auto_takes_the_gpu_in_bf16_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runtime = build_runtime(JOB)
    assert (runtime.device.type, runtime.compute_dtype, runtime.param_dtype) == ("cuda", torch.bfloat16, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build_runtime(JOB).device.type == "cpu"


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match=r"train\.device = cuda, but torch finds no CUDA device: use --train.device cpu"):
        build_runtime(_train(device="cuda"))


def test_one_process_is_a_world_of_one_without_a_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_runtime(_train(device="cpu")) as runtime:
        assert (runtime.world_size, runtime.data_ranks, runtime.data_rank) == (1, 1, 0)
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("given", ["two", "0", "-1", "1.5", ""])
def test_a_senseless_world_size_is_one_line(monkeypatch, given):
    monkeypatch.setenv("WORLD_SIZE", given)
    with pytest.raises(RunError, match="WORLD_SIZE") as caught, open_runtime(JOB):
        pass
    assert "\n" not in str(caught.value)


def test_a_layout_for_more_processes_than_there_are_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ForgeError, match="tp"), open_runtime(evolve(JOB, distributed=DistributedConfig(tp=2))):
        pass


def _waits_and_flags():
    with open_runtime(evolve(JOB, distributed=DistributedConfig(timeout_seconds=77))) as runtime:
        grids = (runtime.mesh.root, runtime.mesh.fsdp, runtime.mesh.fsdp_experts, runtime.mesh.stage, runtime.mesh.loss)
        groups = [runtime.control, *(group for grid in grids for group in grid.get_all_groups())]
        waits = {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}
        exchange = runtime.delayed_max()
        return waits, [exchange(number) for number in (0, 3 * runtime.rank, 0, 0)]


@pytest.mark.slow
def test_every_group_waits_as_long_as_asked_and_a_flag_of_one_rank_reaches_all_one_step_later():
    assert run_ranks(_waits_and_flags, 2) == [({77.0}, [0, 0, 3, 3])] * 2


def test_alone_a_flag_is_seen_at_once():
    exchange = build_runtime(_train(device="cpu")).delayed_max()
    assert [exchange(number) for number in (0, 3, 0)] == [0, 3, 0]


def test_each_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for devices, local_rank, index in ((4, 3, 3), (1, 3, 0)):  # one alone: a launcher shows each process its own
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert _device(JOB.train, local_rank) == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RunError, match="process 2 of this machine has no CUDA device of its own among 2"):
        _device(JOB.train, 2)


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_asked(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    job = evolve(JOB, distributed=DistributedConfig(timeout_seconds=1))
    with (
        pytest.raises(RunError, match=r"the 2 processes did not find each other at 127.0.0.1:\d+ within"),
        open_runtime(job),
    ):
        pass


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_deterministic_kernels_last_as_long_as_the_run(monkeypatch, before):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with deterministic_kernels(True):
            assert _settings() == (True, False) and "CUBLAS_WORKSPACE_CONFIG" in os.environ
        assert _settings() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        with deterministic_kernels(False):
            assert _settings() == before
        assert _settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [":4096:8", ":16:8"])
def test_a_workspace_of_the_users_is_kept(monkeypatch, given):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    with deterministic_kernels(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == given
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == given


def test_a_workspace_that_makes_cublas_differ_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(RunError, match=r"':0:0'.*unset it"), deterministic_kernels(True):
        pass
    assert _settings() == (False, False)


def test_deterministic_kernels_end_with_an_exception_too():
    with pytest.raises(ZeroDivisionError), deterministic_kernels(True):
        raise ZeroDivisionError
    assert _settings() == (False, False)


def _settings():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_work_that_hangs_is_waited_for_no_longer_than_asked():
    over, start = threading.Event(), time.monotonic()
    within(0.1, over.wait)
    over.set()
    assert 0.1 <= time.monotonic() - start < 5
