"""Ranks in a grid: which of them share data, parameters, heads, experts, tokens of a sequence, or layers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge.config import DistributedConfig
from forge.errors import ConfigError

DIMS = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Outermost first: neighbours in tp talk most and are next to each other."""
DATA_DIMS = ("dp_replicate", "dp_shard", "ep")
"""Ranks that differ in one of these read different sequences."""


@frozen
class Mesh:
    """The grid, seen from one rank."""

    root: DeviceMesh  # of DIMS, each present, also where its size is 1
    fsdp: DeviceMesh  # dp_shard * ep * cp, behind dp_replicate where there are replicas: dense parameters
    fsdp_experts: DeviceMesh  # the same of dp_shard * cp: experts, which are cut over ep already
    stage: DeviceMesh  # everything but pp: ranks that hold one pipeline stage together
    loss: DeviceMesh  # dp_replicate * dp_shard * ep * cp: ranks whose tokens add up to the global batch

    def size(self, dim: str) -> int:
        """Ranks along one dimension."""
        return self.root[dim].size()

    def rank(self, dim: str) -> int:
        """This rank's place along one dimension."""
        return self.root.get_local_rank(dim)

    def group(self, dim: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in one dimension only, itself included."""
        return self.root.get_group(dim)

    def place(self, dims: Iterable[str]) -> int:
        """This rank's number among those that differ in these dimensions, the last one counting fastest."""
        place = 0
        for dim in dims:
            place = place * self.size(dim) + self.rank(dim)
        return place

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return math.prod(self.size(dim) for dim in DATA_DIMS)

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        return self.place(DATA_DIMS)

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold one pipeline stage together."""
        return self.stage.size()


def mesh_sizes(config: DistributedConfig, world_size: int) -> dict[str, int]:
    """Size of every dimension, `dp_shard = -1` being what the others leave.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    sizes = {dim: getattr(config, dim) for dim in DIMS}
    rest = math.prod(size for dim, size in sizes.items() if dim != "dp_shard")
    if sizes["dp_shard"] == -1:
        if world_size % rest:
            raise ConfigError(
                f"distributed: {_product(sizes, 'dp_shard')} = {rest} does not divide the {world_size} processes:"
                " start a multiple of it, or lower one of them"
            )
        sizes["dp_shard"] = world_size // rest
    elif math.prod(sizes.values()) != world_size:
        raise ConfigError(
            f"distributed: {_product(sizes)} = {math.prod(sizes.values())}, but there are {world_size} processes:"
            " start as many, or set dp_shard = -1 for the rest"
        )
    return sizes


def _product(sizes: dict[str, int], without: str = "") -> str:
    shown = {dim: size for dim, size in sizes.items() if dim != without}
    return " x ".join(f"{dim} {size}" for dim, size in shown.items())


def build_mesh(config: DistributedConfig, world_size: int, device_type: str) -> Mesh:
    """Make the process groups of every dimension; collective, after `init_process_group`."""
    sizes = mesh_sizes(config, world_size)
    root = init_device_mesh(device_type, tuple(sizes[dim] for dim in DIMS), mesh_dim_names=DIMS)
    fsdp = root["dp_shard", "ep", "cp"]._flatten("fsdp")
    experts = root["dp_shard", "cp"]._flatten("fsdp_experts")
    return Mesh(
        root=root,
        fsdp=_replicated(root, fsdp),
        fsdp_experts=_replicated(root, experts),
        stage=root["dp_replicate", "dp_shard", "ep", "cp", "tp"]._flatten("stage"),
        loss=root["dp_replicate", "dp_shard", "ep", "cp"]._flatten("loss"),
    )


def _replicated(root: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    """A mesh behind dp_replicate, unless that is 1: FSDP2 would all-reduce every block over one rank."""
    replicas = root["dp_replicate"]
    return shards if replicas.size() == 1 else DeviceMesh._concatenate([replicas, shards])
