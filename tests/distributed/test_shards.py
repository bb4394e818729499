"""A rank's part of a tensor lies where FSDP2 and TP put it, however unevenly they cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge.distributed.shards import local_slices, shard_of

FSDP, TP = 4, 2


@pytest.fixture(params=range(FSDP * TP))
def mesh(request):
    """A mesh of eight ranks, seen from each of them without starting any."""
    dist.init_process_group("fake", rank=request.param, world_size=FSDP * TP, store=FakeStore())
    yield init_device_mesh("cpu", (FSDP, TP))
    dist.destroy_process_group()


def _like(mesh, shape, placements):
    return DTensor.from_local(
        torch.empty(0, device="meta"), mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 13, 16])
def test_fsdp_over_tp_cuts_what_tp_left(rows, mesh):
    """Nine rows over tp 2 are 5 + 4, over fsdp 4 then 2 + 2 + 1 + 0 and 1 + 1 + 1 + 1; torch's offsets say otherwise."""
    whole = torch.arange(rows * 3).view(rows, 3)
    shard, head = mesh.get_coordinate()
    empty = whole[:0]
    of_tp = [*whole.chunk(TP), *[empty] * TP][head]
    expected = [*of_tp.chunk(FSDP), *[empty] * FSDP][shard] if len(of_tp) else empty
    like = _like(mesh, whole.shape, (_StridedShard(0, split_factor=TP), Shard(0)))
    assert torch.equal(shard_of(whole, like), expected)


def test_dimensions_are_cut_apart_and_replicas_hold_the_same(mesh):
    shard, head = mesh.get_coordinate()
    like = _like(mesh, (8, 6), (Shard(0), Shard(1)))
    assert local_slices(like) == (slice(2 * shard, 2 * shard + 2), slice(3 * head, 3 * head + 3))
    like = _like(mesh, (8, 6), (Shard(0), Replicate()))
    assert local_slices(like) == (slice(2 * shard, 2 * shard + 2), slice(0, 6))
