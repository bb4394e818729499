"""The one place and the one order in which parallelism is applied to a model on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge.config import JobConfig
from forge.distributed.context_parallel import apply_context_parallel
from forge.distributed.expert_parallel import apply_expert_parallel
from forge.distributed.fsdp import apply_fsdp
from forge.distributed.mesh import Mesh
from forge.distributed.pipeline import Stages, build_stages
from forge.distributed.shards import local_data, shard_of
from forge.distributed.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from forge.errors import ConfigError
from forge.model import Transformer
from forge.model.fp8 import apply_fp8
from forge.model.init import init_tensor
from forge.model.moe import check_expert_widths
from forge.model.recompute import apply_activation_checkpointing, compile_blocks, compile_whole


def parallelize(
    model: Transformer, config: JobConfig, mesh: Mesh | None, *, compute_dtype: torch.dtype, param_dtype: torch.dtype
) -> None:
    """FP8, CP, EP, TP, recomputation, compilation, FSDP2, in this order and in place; without a mesh the local ones.

    Full recomputation under TP comes after compilation: torch cannot compile a checkpoint with DTensors inside.
    """
    if config.train.fp8:
        apply_fp8(model, ranks=1 if mesh is None else mesh.size("tp"))
    if mesh is not None:
        apply_context_parallel(model, config.train.seq_len, mesh)
        apply_expert_parallel(model, mesh)
        if mesh.size("tp") > 1:
            check_tensor_parallel(config, mesh.size("tp"))
            apply_tensor_parallel(model, mesh)
    check_expert_widths(config.model, compute_dtype, 1 if mesh is None else mesh.size("tp"))
    again = config.train.activation_checkpointing
    inside = config.train.compile and again == "full" and mesh is not None and mesh.size("tp") > 1
    if again != "none" and not inside:
        apply_activation_checkpointing(model, again)
    if config.train.compile:
        lean = mesh is None and not torch.cuda.is_available()
        lean &= not config.profiling.steps  # a trace would show a whole block as one operator
        lean &= again == "none"  # attention computed again cannot be called from C++
        experts = compute_dtype == torch.bfloat16
        check_compile_scope(config, 1 if mesh is None else mesh.root.size())
        options = {"experts": experts, "lean": lean, "cuda_graphs": config.train.cuda_graphs}
        if config.train.compile_scope == "model":
            compile_whole(model, **options)
        else:
            compile_blocks(model, **options, under_checkpoint=inside)
    if inside:
        apply_activation_checkpointing(model, "full")
    if mesh is not None:
        model.to(param_dtype)
        apply_fsdp(model, mesh, config.distributed, compute_dtype=compute_dtype, param_dtype=param_dtype)


def check_compile_scope(config: JobConfig, ranks: int) -> None:
    """Refuse what needs the whole model in one process: FSDP2's hooks lie between blocks, and move the parameters.

    Raises:
        ConfigError: names the key.
    """
    if ranks == 1 or not config.train.compile:
        return
    if config.train.compile_scope == "model":
        raise ConfigError(f"train.compile_scope = model needs one process, and there are {ranks}: choose block")
    if config.train.cuda_graphs:
        raise ConfigError(f"train.cuda_graphs = true needs one process, and there are {ranks}: set it to false")


def parallelize_stages(
    model: Transformer, config: JobConfig, mesh: Mesh, *, compute_dtype: torch.dtype, param_dtype: torch.dtype
) -> Stages:
    """Cut the model into pipeline stages, and `parallelize` those of this rank."""
    stages = build_stages(model, config, mesh)
    for stage in stages.transformers:
        parallelize(stage, config, mesh, compute_dtype=compute_dtype, param_dtype=param_dtype)
    return stages


def allocate(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Give this rank's parts storage, with whatever it holds; by name, sharing the module's storage."""
    model.to_empty(device=device)
    return {name: p.detach() for name, p in model.named_parameters()}


def materialize(model: nn.Module, config: JobConfig, device: torch.device) -> dict[str, Tensor]:
    """Allocate and initialise this rank's parts: the initial weights of one process, cut.

    One parameter exists in full at a time, on the CPU.

    Returns:
        The module's own parameters by fully-qualified name; they share its storage.
    """
    params = allocate(model, device)
    for name, p in params.items():
        whole = init_tensor(name, p.shape, config.model, config.train.seed)
        local_data(p).copy_(shard_of(whole, p))
    return params
