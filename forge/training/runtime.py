"""What this process runs on: device, dtypes, ranks."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from forge.config import JobConfig, TrainConfig
from forge.distributed.mesh import Mesh, build_mesh, mesh_sizes
from forge.errors import RunError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS repeats itself (torch's `checkCuBLASConfigDeterministic`)."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@frozen
class Runtime:
    """The process as the training step sees it."""

    device: torch.device
    compute_dtype: torch.dtype  # of the forward and backward pass
    param_dtype: torch.dtype  # of the stored parameters
    mesh: Mesh | None = None  # None: this process is alone

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return 1 if self.mesh is None else self.mesh.root.size()

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's logs and files: rank 0."""
        return self.mesh is None or dist.get_rank() == 0

    def barrier(self) -> None:
        """Wait for every process of the job."""
        if self.mesh is not None:
            dist.barrier()

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is true on any rank: all of them get the same answer, at the same step."""
        if self.mesh is None:
            return flag
        seen = torch.tensor(flag, dtype=torch.int32, device=self.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen)

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

    Ranks and addresses come from torchrun's environment. A job of one process makes no group.

    Raises:
        RunError: the device is not there.
        ConfigError: the mesh does not fit the number of processes.
    """
    world_size = _world_size()
    mesh_sizes(config.distributed, world_size)
    if world_size == 1:
        yield build_runtime(config)
        return
    device = _device(config.train, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owned = not dist.is_initialized()
    if owned:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield evolve(build_runtime(config), device=device, mesh=build_mesh(config.distributed, world_size, device.type))
    finally:
        if owned:
            dist.destroy_process_group()


def build_runtime(config: JobConfig) -> Runtime:
    """Resolve `auto` in the train section, for one process; changes no global setting.

    Raises:
        RunError: the device is not there.
    """
    device = _device(config.train)
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return Runtime(device, _DTYPES[precision], _DTYPES[config.train.param_dtype])


def _world_size() -> int:
    """Processes of the job, as torchrun says; 1 when alone.

    Raises:
        RunError: WORLD_SIZE is no number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise RunError(f"WORLD_SIZE = {text!r} in the environment is no number of processes: unset it, or use torchrun")
    return int(text)


def _device(train: TrainConfig, local_rank: int = 0) -> torch.device:
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RunError("train.device = cuda, but torch finds no CUDA device: use --train.device cpu")
    if train.device == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        kind = train.device
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


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
