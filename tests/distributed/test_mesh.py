"""The grid of ranks: sizes that multiply, and one line where they do not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.config import DistributedConfig
from forge.distributed.mesh import DIMS, build_mesh, mesh_sizes
from forge.errors import ConfigError
from tests.distributed.ranks import run_ranks

sizes = st.fixed_dictionaries({dim: st.integers(1, 4) for dim in DIMS if dim != "dp_shard"})


@given(sizes=sizes, shard=st.integers(1, 4))
def test_the_rest_of_the_world_shards(sizes, shard):
    world = math.prod(sizes.values()) * shard
    found = mesh_sizes(DistributedConfig(**sizes), world)
    assert found == {**sizes, "dp_shard": shard} == mesh_sizes(DistributedConfig(**sizes, dp_shard=shard), world)


def test_a_wrong_product_says_which_numbers():
    with pytest.raises(ConfigError, match=r"tp 3 = 3 does not divide the 4 processes"):
        mesh_sizes(DistributedConfig(tp=3), 4)
    with pytest.raises(ConfigError, match=r"dp_shard 2 x ep 1 x cp 1 x tp 4 = 8, but there are 4 processes"):
        mesh_sizes(DistributedConfig(tp=4, dp_shard=2), 4)


def _places():
    found = {}
    for layout in ({}, {"dp_replicate": 2}, {"tp": 2}, {"cp": 2}, {"ep": 2}, {"pp": 2, "tp": 2}, {"ep": 2, "cp": 2}):
        mesh = build_mesh(DistributedConfig(**layout), 4, "cpu")
        shapes = tuple(mesh.fsdp.shape), tuple(mesh.fsdp_experts.shape), mesh.loss.size(), mesh.stage_ranks
        found[tuple(layout.items())] = (*shapes, mesh.data_rank, mesh.data_ranks)
    return found


def test_who_shares_what():
    ranks = run_ranks(_places, 4)
    shapes = {layout: found[:4] for layout, found in ranks[0].items()}
    assert shapes == {
        (): ((4,), (4,), 4, 4),
        (("dp_replicate", 2),): ((2, 2), (2, 2), 4, 4),
        (("tp", 2),): ((2,), (2,), 2, 4),
        (("cp", 2),): ((4,), (4,), 4, 4),
        (("ep", 2),): ((4,), (2,), 4, 4),
        (("pp", 2), ("tp", 2)): ((1,), (1,), 1, 2),
        (("ep", 2), ("cp", 2)): ((4,), (2,), 4, 4),
    }
    for layout in shapes:
        data = [rank[layout][4] for rank in ranks]
        count = ranks[0][layout][5]
        assert sorted(set(data)) == list(range(count))
        assert all(data.count(place) == 4 // count for place in data)
