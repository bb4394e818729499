"""What this process runs on: device, dtypes, ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from forge.config import JobConfig, TrainConfig
from forge.distributed.launch import Launch, find_launch
from forge.distributed.mesh import Mesh, build_mesh, mesh_sizes
from forge.errors import RunError, Stopped

TEARDOWN_SECONDS = 10.0
"""Longest wait for the process groups to end; after it they are left to the end of the process."""

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS repeats itself (torch's `checkCuBLASConfigDeterministic`)."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By the config's names."""


@frozen
class Runtime:
    """The process as the training step sees it."""

    device: torch.device
    compute_dtype: torch.dtype  # of the forward and backward pass
    param_dtype: torch.dtype  # of the stored parameters
    mesh: Mesh | None = None  # None: this process is alone
    control: dist.ProcessGroup | None = None  # of all ranks, over host memory: flags and barriers
    store: dist.Store | None = None  # of the whole job; None: alone, or the process group is the caller's

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return 1 if self.mesh is None else self.mesh.root.size()

    @property
    def rank(self) -> int:
        """This process's place in the job."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's logs and files: rank 0."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process of the job."""
        if self.mesh is not None:
            dist.barrier(self.control)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on any rank; all of them wait for the answer."""
        if self.mesh is None:
            return flag
        seen = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.control)
        return bool(seen)

    def delayed_max(self) -> Callable[[int], int]:
        """A function that takes a number >= 0 at every step; once it was > 0 on any rank, all ranks get the largest.

        They get it at the same step, the one after: the exchange goes on in the background over host memory, so no
        step waits for the device or for the other ranks. Alone, the number itself comes back at once.
        """
        if self.mesh is None:
            return lambda number: number
        pending: tuple[torch.Tensor, dist.Work | None] | None = None

        def exchange(number: int) -> int:
            nonlocal pending
            if pending is not None:
                largest, work = pending
                if work is not None:
                    work.wait()
                if largest:
                    return int(largest)
            given = torch.tensor(number)
            pending = given, dist.all_reduce(given, dist.ReduceOp.MAX, group=self.control, async_op=True)
            return 0

        return exchange

    @property
    def vocab_group(self) -> dist.ProcessGroup | None:
        """The ranks over which tensor parallelism cuts the head's rows; None = the head is whole."""
        return self.mesh.group("tp") if self.mesh is not None and self.mesh.size("tp") > 1 else None

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return 1 if self.mesh is None else self.mesh.data_ranks

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        return 0 if self.mesh is None else self.mesh.data_rank


@contextmanager
def open_runtime(config: JobConfig) -> Generator[Runtime, None, None]:
    """`build_runtime`, and the process group of a job of several processes for as long.

    Ranks and addresses come from `find_launch`. A job of one process makes no group; a group that is there already is
    used, and left. However the job ends, its group ends in bounded time: after a failure nothing waits for other ranks.

    Raises:
        RunError: the device is not there, the launcher's variables make no sense, or the ranks do not find each other.
        ConfigError: the mesh does not fit the number of processes.
    """
    launch = find_launch()
    mesh_sizes(config.distributed, launch.world_size)
    if launch.world_size == 1:
        yield build_runtime(config)
        return
    device = _device(config.train, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.distributed.timeout_seconds)
    owned = not dist.is_initialized()
    store = _join(launch, device, timeout) if owned else None
    control = dist.new_group(backend="gloo" if device.type == "cuda" else dist.get_backend(), timeout=timeout)
    assert control is not None
    end: Callable[[], None] = dist.distributed_c10d._abort_process_group
    try:
        mesh = build_mesh(config.distributed, launch.world_size, device.type)
        _limit_waits(mesh, timeout)
        yield evolve(build_runtime(config), device=device, mesh=mesh, control=control, store=store)
        end = dist.destroy_process_group
    except Stopped:
        end = dist.destroy_process_group  # all ranks stopped together
        raise
    finally:
        within(TEARDOWN_SECONDS, end if owned else lambda: dist.destroy_process_group(control))


def _join(launch: Launch, device: torch.device, timeout: timedelta) -> dist.Store:
    """Meet the other ranks in the store of rank 0 (torchrun's own, under torchrun), and make the default group."""
    host = f"[{launch.address}]" if ":" in launch.address else launch.address  # IPv6
    try:
        store, _, _ = next(
            dist.rendezvous(f"tcp://{host}:{launch.port}", launch.rank, launch.world_size, timeout=timeout)
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except dist.DistError as error:
        raise RunError(
            f"the {launch.world_size} processes did not find each other at {launch.address}:{launch.port} within"
            f" distributed.timeout_seconds = {timeout.total_seconds():g}: {str(error).splitlines()[0]}"
        ) from None
    return store


def _limit_waits(mesh: Mesh, timeout: timedelta) -> None:
    """Every group of the mesh waits as long as the default group: torch makes them with a default of its own."""
    for grid in (mesh.root, mesh.fsdp, mesh.fsdp_experts, mesh.stage, mesh.loss):
        for group in grid.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def within(seconds: float, work: Callable[[], object]) -> None:
    """Call `work` and wait for it, but no longer than that: a rank that is gone may keep it for ever."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def build_runtime(config: JobConfig) -> Runtime:
    """Resolve `auto` in the train section, for one process; changes no global setting.

    Raises:
        RunError: the device is not there.
    """
    device = _device(config.train)
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return Runtime(device, DTYPES[precision], DTYPES[config.train.param_dtype])


def _device(train: TrainConfig, local_rank: int = 0) -> torch.device:
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RunError("train.device = cuda, but torch finds no CUDA device: use --train.device cpu")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if train.device == "auto" else train.device
    if kind == "cpu":
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if devices <= 1:
        return torch.device("cuda", 0)  # of a launcher that shows each process its own
    if local_rank >= devices:
        raise RunError(
            f"process {local_rank} of this machine has no CUDA device of its own among {devices}: start at most"
            f" {devices} processes a machine"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def deterministic_kernels(enabled: bool) -> Generator[None, None, None]:
    """Refuse kernels whose result depends on scheduling, for the duration of a run.

    torch reads cuBLAS's setting once, at the first product on a GPU: enter before anything is computed.

    Raises:
        RunError: the environment asks cuBLAS for a workspace with which it is not deterministic.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS)
    if enabled and workspace not in (None, *_DETERMINISTIC_CUBLAS):
        raise RunError(
            f"{_CUBLAS} = {workspace!r} in the environment contradicts train.deterministic: unset it, or use"
            f" {' or '.join(_DETERMINISTIC_CUBLAS)}"
        )
    if enabled:
        os.environ.setdefault(_CUBLAS, _DETERMINISTIC_CUBLAS[0])
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if enabled:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
            if workspace is None:
                os.environ.pop(_CUBLAS, None)
