"""The one place and the one order in which parallelism is applied to a model on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import JobConfig
from forge.distributed.fsdp import apply_fsdp
from forge.distributed.mesh import Mesh
from forge.distributed.shards import local_part, shard_of
from forge.model import Transformer
from forge.model.init import init_tensor
from forge.model.recompute import apply_activation_checkpointing, compile_blocks


def parallelize(
    model: Transformer, config: JobConfig, mesh: Mesh | None, *, compute_dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    """TP, EP, activation checkpointing, compilation, FSDP2, in this order, in place; without a mesh the local ones."""
    if config.train.activation_checkpointing != "none":
        apply_activation_checkpointing(model)
    if config.train.compile:
        compile_blocks(model)
    if mesh is not None:
        model.to(param_dtype)
        apply_fsdp(model, mesh, compute_dtype=compute_dtype, param_dtype=param_dtype)


def materialize(model: Transformer, config: JobConfig, device: torch.device) -> dict[str, Tensor]:
    """Allocate and initialise this rank's parts: the initial weights of one process, cut.

    One parameter exists in full at a time, on the CPU.

    Returns:
        The module's own parameters by fully-qualified name; they share its storage.
    """
    model.to_empty(device=device)
    params = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in params.items():
        whole = init_tensor(name, p.shape, config.model, config.train.seed)
        local_part(p).copy_(shard_of(whole, p))
    return params
