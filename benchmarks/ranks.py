"""A function on several gloo processes of this machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forge.errors import RunError


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each of `world_size` ranks, one thread each.

    Raises:
        RunError: a rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_main, (world_size, port, folder, function, args), nprocs=world_size)
        except mp.ProcessRaisedException as failure:
            last = str(failure).strip().splitlines()[-1]
            raise RunError(f"{function.__name__} on {world_size} ranks failed: {last}") from failure
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


def _main(rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        torch.save(function(*args), Path(folder, str(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
