"""FSDP2 and HSDP: parameters, gradients and optimizer state cut over ranks, gathered block by block."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from forge.config import DistributedConfig
from forge.distributed.mesh import Mesh
from forge.distributed.shards import local_data
from forge.model import Transformer
from forge.model.moe import MoE


def apply_fsdp(
    model: Transformer,
    mesh: Mesh,
    config: DistributedConfig,
    *,
    compute_dtype: torch.dtype,
    param_dtype: torch.dtype,
) -> None:
    """Shard every block and the rest of the model in place.

    Gradients are summed over the ranks, never averaged: the loss is already divided by the targets of the global
    batch. They are reduced in fp32 whatever the compute dtype.

    Args:
        config: when what was gathered is freed, and how far ahead it is gathered.
    """
    reshard = reshard_after_forward(config)
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == param_dtype else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    placement = partial(_placement, mesh.fsdp.size(-1))
    for block in model.blocks.children():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, MoE) and mesh.size("ep") > 1:
            of_experts = partial(_placement, mesh.fsdp_experts.size(-1))
            fully_shard(
                mlp.experts,
                mesh=mesh.fsdp_experts,
                mp_policy=policy,
                shard_placement_fn=of_experts,
                reshard_after_forward=reshard,
            )
        fully_shard(
            block, mesh=mesh.fsdp, mp_policy=policy, shard_placement_fn=placement, reshard_after_forward=reshard
        )
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard)
    if config.prefetch_blocks:
        _prefetch(model, config.prefetch_blocks)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def reshard_after_forward(config: DistributedConfig) -> bool | None:
    """Whether parameters are freed between forward and backward pass; None = all but the root's, FSDP2's default.

    Under a pipeline a stage keeps them: it would gather them anew for every micro-batch (torchtitan's default too).
    """
    if config.reshard_after_forward == "auto":
        return False if config.pp > 1 else None
    return config.reshard_after_forward == "always"


def _prefetch(model: Transformer, ahead: int) -> None:
    """Gather the parameters of the next `ahead` blocks while one computes, in forward and in backward order."""
    blocks = list(model.blocks.children())
    forward = cast(list[FSDPModule], [model, *blocks])
    backward = cast(list[FSDPModule], [model, *reversed(blocks)])
    for place in range(len(forward)):
        following = slice(place + 1, place + 1 + ahead)
        forward[place].set_modules_to_forward_prefetch(_sharded_in(forward[following]))
        backward[place].set_modules_to_backward_prefetch(_sharded_in(backward[following]))


def _sharded_in(blocks: list[FSDPModule]) -> list[FSDPModule]:
    """The blocks, and the experts that are sharded on their own in them."""
    return [module for block in blocks for module in fsdp_modules(cast(nn.Module, block))]


def _placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """Cut expert weights (E, in, out) within the experts where there are fewer of them than ranks; else as always."""
    shape = local_data(parameter).shape
    if len(shape) < 3 or shape[0] >= ranks:
        return None
    return next((Shard(dim) for dim in (1, 2) if shape[dim] % ranks == 0), None)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every module of the model that FSDP2 shards on its own."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
