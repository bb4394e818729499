"""Between a sharded tensor and the part of it that this rank holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from forge.pytree import PyTree, tree_leaves, tree_map

_CUTS = (Shard, _StridedShard)
"""FSDP over TP cuts a dimension twice, which is a `_StridedShard`."""


def is_sharded(params: Mapping[str, Tensor]) -> bool:
    """Whether parameters are DTensors; all of a model's are, or none."""
    return isinstance(next(iter(params.values()), None), DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, through which gradients flow; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_data(tensor: Tensor) -> Tensor:
    """This rank's part, outside of autograd and sharing its storage.

    A step asks it of every leaf several times, and `to_local` makes a node of the graph or a view each time.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def tree_local(tree: PyTree) -> PyTree:
    """`local_data` of every leaf."""
    return tree_map(local_data, tree)


def tree_whole(tree: PyTree) -> PyTree:
    """Every leaf in full, on every rank; all ranks must call it together."""
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)


def as_sharded(local: Tensor, like: Tensor) -> Tensor:
    """A tensor whose part on this rank is `local`, laid out over the ranks as `like` is."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def tree_sharded(tree: PyTree, like: PyTree) -> PyTree:
    """`as_sharded` of every leaf; the trees have one structure."""
    return tree_map(as_sharded, tree, like)


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Where in the whole tensor this rank's part lies.

    A `_StridedShard` cuts what the mesh dims to its right left over; torch's own offsets differ from what FSDP2 does
    where TP cuts unevenly.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    placed = list(zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True))
    later = [cut for cut in reversed(placed) if isinstance(cut[0], _StridedShard)]
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    for placement, place, count in [cut for cut in placed if not isinstance(cut[0], _StridedShard)] + later:
        if isinstance(placement, _CUTS):
            length = lengths[placement.dim]
            begin, end = (min(length, index * -(-length // count)) for index in (place, place + 1))
            starts[placement.dim] += begin
            lengths[placement.dim] = end - begin
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, laid out as `like` is; no communication."""
    return whole[local_slices(like)] if isinstance(like, DTensor) else whole


def sharded_norm(tree: PyTree, stage_ranks: int) -> Tensor:
    """Global 2-norm over the leaves of all ranks, fp32 (); the same on every rank.

    Args:
        tree: DTensors (on any meshes) and plain tensors, which each rank of a stage holds a copy of.
        stage_ranks: ranks that hold the same layers; a part that r of them hold counts 1/r on each.
    """
    by_weight: dict[float, list[Tensor]] = defaultdict(list)
    for leaf in tree_leaves(tree):
        by_weight[pieces(leaf) / stage_ranks].append(local_data(leaf))
    squares = [
        torch.stack(torch._foreach_norm(parts, dtype=torch.float32)).square().sum() * weight
        for weight, parts in by_weight.items()
    ]
    total = torch.stack(squares).sum().double()
    dist.all_reduce(total)
    return total.sqrt().float()


def pieces(tensor: Tensor) -> int:
    """Into how many different parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    cut = [mesh_dim for mesh_dim, placement in enumerate(tensor.placements) if isinstance(placement, _CUTS)]
    return math.prod(tensor.device_mesh.size(mesh_dim) for mesh_dim in cut)


def cut_dims(tensor: Tensor) -> set[int]:
    """The dimensions along which a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return set()
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return {placement.dim for placement, size in sizes if isinstance(placement, _CUTS) and size > 1}
