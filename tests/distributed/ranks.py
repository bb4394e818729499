"""Ranks for tests: several gloo processes of this machine, or one of many that are not there."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.ranks import run_on_ranks as run_ranks

__all__ = ["fake_rank", "run_ranks"]


@contextmanager
def fake_rank(rank: int, world_size: int) -> Generator[None, None, None]:
    """This process as one rank of many that are not there: groups can be made, and nothing is sent."""
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, environment):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            with mock.patch.object(dist.distributed_c10d, "_set_pg_timeout"):  # which no fake group has
                yield
        finally:
            dist.destroy_process_group()
