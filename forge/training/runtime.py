"""What this process runs on: device, dtypes, ranks."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from attrs import frozen

from forge.config import DistributedConfig, JobConfig, TrainConfig
from forge.errors import ConfigError, RunError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@frozen
class Runtime:
    """The process as the training step sees it."""

    device: torch.device
    compute_dtype: torch.dtype  # of the forward and backward pass
    param_dtype: torch.dtype  # of the stored parameters
    rank: int = 0
    world_size: int = 1


def build_runtime(config: JobConfig) -> Runtime:
    """Resolve `auto` in the train section; changes no global setting.

    Raises:
        RunError: the device is not there.
        ConfigError: a parallel layout that this version cannot train.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_layout(config.distributed, world_size)
    device = _device(config.train)
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return Runtime(device, _DTYPES[precision], _DTYPES[config.train.param_dtype], world_size=world_size)


def check_layout(distributed: DistributedConfig, world_size: int) -> None:
    """Refuse a parallel layout before anything is allocated.

    Raises:
        ConfigError: more than one process, or a mesh dimension greater than 1.
    """
    sizes = {
        name: getattr(distributed, name)
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
        if getattr(distributed, name) not in (1, -1)
    }
    if sizes or world_size > 1:
        asked = ", ".join(f"distributed.{name} = {size}" for name, size in sizes.items()) or f"{world_size} processes"
        raise ConfigError(f"{asked}: this version trains on one process; start one, with every mesh dimension at 1")


def _device(train: TrainConfig) -> torch.device:
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RunError("train.device = cuda, but torch finds no CUDA device: use --train.device cpu")
    if train.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(train.device)


@contextmanager
def deterministic_kernels(enabled: bool) -> Generator[None, None, None]:
    """Refuse kernels whose result depends on scheduling, for the duration of a run."""
    before = torch.are_deterministic_algorithms_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
