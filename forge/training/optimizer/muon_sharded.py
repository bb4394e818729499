"""Muon on sharded matrices: each is orthogonalised whole, by one rank, so that every sharding is the same optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.config import Muon
from forge.distributed.mesh import Mesh
from forge.distributed.shards import as_sharded, cut_dims, shard_of
from forge.training.optimizer.core import Params
from forge.training.optimizer.muon import OrthogonalSteps, orthogonal_steps


def sharded_orthogonal_steps(layouts: Mapping[str, Tensor], mesh: Mesh) -> OrthogonalSteps:
    """`orthogonal_steps` over this rank's parts; every rank of the stage must call it together.

    The matrices are dealt out over the ranks of the stage: each gathers them all in turn, keeps its own, and sends back
    what it made of them. Experts that are cut along their own dimension only are whole matrices already.

    Args:
        layouts: name -> a parameter laid out as its momentum is.
    """
    group, ranks, me = mesh.stage.get_group(), mesh.stage.size(), mesh.stage.get_local_rank()

    def steps(momenta: Params, config: Muon) -> Params:
        at_home = {name: m for name, m in momenta.items() if _holds_whole_matrices(layouts[name])}
        dealt = [name for name in momenta if name not in at_home]
        mine: Params = {}
        for place, name in enumerate(dealt):
            gathered = _whole(as_sharded(momenta[name], layouts[name]))
            if place % ranks == me:
                mine[name] = gathered
        made = orthogonal_steps(mine, config)
        result = orthogonal_steps({name: m for name, m in at_home.items() if m.numel()}, config)
        result |= {name: torch.zeros_like(m) for name, m in at_home.items() if not m.numel()}
        for place, name in enumerate(dealt):
            like = layouts[name]
            step = made[name] if name in made else torch.empty(like.shape, dtype=torch.float32, device=like.device)
            step = step.contiguous()
            dist.broadcast(step, group_src=place % ranks, group=group)
            result[name] = shard_of(step, like).to(momenta[name].dtype)
        return result

    return steps


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _holds_whole_matrices(layout: Tensor) -> bool:
    return all(dim < layout.dim() - 2 for dim in cut_dims(layout))
