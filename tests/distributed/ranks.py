"""Run a function on several gloo processes of this machine and get what each returned."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank of a fresh process group; the returned values by rank.

    A rank that raises ends all of them, and its traceback is in the exception.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, (world_size, port, folder, function, args), nprocs=world_size)
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


@contextmanager
def fake_rank(rank: int, world_size: int) -> Generator[None, None, None]:
    """This process as one rank of many that are not there: groups can be made, and nothing is sent."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, environment):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
