"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022), applied from outside.

Between blocks a rank holds its share of the sequence, (B, S / tp, dim). A norm works on that share and gathers the
sequence; projections are cut by heads, hidden width and vocabulary; what comes back is summed and cut over the
sequence again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from forge.config import JobConfig
from forge.distributed.mesh import Mesh
from forge.distributed.shards import local_data, local_part
from forge.errors import ConfigError
from forge.model import Transformer
from forge.model.attention import Attention
from forge.model.block import Block
from forge.model.mlp import MLP
from forge.model.moe import Experts, MoE, RouterStats, Routing, grouped_mlps

Plan = dict[str, ParallelStyle]
SEQUENCE = 1  # the dimension of (B, S, dim)


def check_tensor_parallel(config: JobConfig, ranks: int) -> None:
    """Refuse a model that `ranks` tensor-parallel ranks cannot share: evenly, but for the vocabulary's rows.

    Raises:
        ConfigError: names the number that does not divide.
    """
    for what, number in _shared_evenly(config):
        if number % ranks:
            raise ConfigError(f"{what} = {number} is not divisible by distributed.tp = {ranks}: change one of them")
    rows = config.model.vocab_size
    if -(-rows // ranks) * (ranks - 1) >= rows:
        raise ConfigError(
            f"model.vocab_size = {rows} leaves no row for the last of distributed.tp = {ranks} ranks: lower tp"
        )


def _shared_evenly(config: JobConfig) -> Iterator[tuple[str, int]]:
    """What is cut over the ranks, by name."""
    model, layers = config.model, range(config.model.n_layers)
    yield "model.n_heads", model.query_heads
    yield "model.n_kv_heads", model.kv_heads
    if not all(model.is_moe_layer(layer) for layer in layers):
        yield "model.ffn_hidden_dim", model.ffn_width
    if any(model.is_moe_layer(layer) for layer in layers):
        yield "model.moe.expert_hidden_dim", model.expert_width
    if config.distributed.cp > 1:
        yield f"train.seq_len / distributed.cp {config.distributed.cp}", config.train.seq_len // config.distributed.cp
    else:
        yield "train.seq_len", config.train.seq_len


def apply_tensor_parallel(model: Transformer, mesh: Mesh) -> None:
    """Cut the model over `mesh`'s tp ranks, in place; on the meta device, after expert parallelism and before FSDP2.

    Parameters become DTensors, the rows of head and embedding included, which FSDP2 cuts further. The model's `output`
    gets the hidden states of whole sequences, whose gradient is summed over tp, and this rank's rows of the head.
    """
    tp = mesh.root["tp"]
    plan: Plan = {
        "embed": _RowsOfEmbedding(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
        "position_embed": _PositionsOfShare(),
        "norm": _NormThenGather(use_local_output=True),
        "head": ColwiseParallel(),  # never called: the loss reads its rows
    }
    for name, block in model.blocks.named_children():
        assert isinstance(block, Block)
        plan |= {f"blocks.{name}.{inner}": style for inner, style in _block_plan(block).items()}
    present = {name for name, _ in model.named_modules()}
    plan = {name: style for name, style in plan.items() if name in present}
    parallelize_module(model, tp, plan, src_data_rank=None)
    for module in model.modules():
        if isinstance(module, MoE):
            _cut_experts(module.experts, mesh)
            _join_addends(module, tp)


def _block_plan(block: Block) -> Plan:
    plan: Plan = {
        "attn_norm": _NormThenGather(),
        "mlp_norm": _NormThenGather(use_local_output=isinstance(block.mlp, MoE)),
    }
    plan |= {f"attn.{name}": style for name, style in _attention_plan(block.attn).items()}
    if isinstance(block.mlp, MLP):
        plan |= {f"mlp.{name}": style for name, style in _mlp_plan(block.mlp, Shard(SEQUENCE)).items()}
    elif block.mlp.shared is not None:
        # An addend of what the experts make, which is summed over the ranks once.
        plan |= {f"mlp.shared.{name}": style for name, style in _mlp_plan(block.mlp.shared, Partial()).items()}
    return plan


def _attention_plan(attention: Attention) -> Plan:
    plan: Plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan["wo"] = RowwiseParallel(output_layouts=Shard(SEQUENCE))
    if attention.q_norm is not None:
        # Whole weights over each rank's heads, (B, heads, S, width): the gradient is the sum over the ranks.
        plan |= {name: SequenceParallel(sequence_dim=1, use_local_output=True) for name in ("q_norm", "k_norm")}
    return plan


def _mlp_plan(mlp: MLP, output: Placement) -> Plan:
    plan: Plan = {"w_up": ColwiseParallel(), "w_down": RowwiseParallel(output_layouts=output)}
    if mlp.w_gate is not None:
        plan["w_gate"] = ColwiseParallel()
    return plan


class _RowsOfEmbedding(RowwiseParallel):
    """An embedding cut by rows, whose sums have arrived when it returns.

    The base class returns a tensor that waits when it is first used; a compiled block drops the gradient of one, and
    the embedding would not learn.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        return outputs.redistribute(placements=output_layouts).to_local()


class _NormThenGather(SequenceParallel):
    """A norm over this rank's share of the sequence, whose output is the whole sequence on every rank.

    The gradient of the output is summed over the ranks: each made only its heads', columns' or rows' addend of it.
    """

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: DTensor, device_mesh: DeviceMesh) -> Tensor:
        whole = outputs.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()]) if use_local_output else whole


class _PositionsOfShare(ParallelStyle):
    """An embedding of positions, of which each rank looks up its share of the sequence's."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            positions = inputs[0]  # (S,), or (B, S) where documents count their own
            along = [Shard(positions.dim() - 1)]
            return DTensor.from_local(positions, device_mesh, [Replicate()]).redistribute(placements=along)

        def local(_: nn.Module, inputs: tuple[Tensor], outputs: DTensor) -> Tensor:
            return outputs.to_local()

        module.register_forward_pre_hook(share)
        module.register_forward_hook(local)
        return distribute_module(module, device_mesh)  # the whole weight on every rank


def _cut_experts(experts: Experts, mesh: Mesh) -> None:
    """Cut every expert's hidden width; those of an expert-parallel rank are cut once more."""
    ranks, place = mesh.size("tp"), mesh.rank("tp")
    dealt = False
    for name, weight in list(experts.named_parameters()):
        dim = 1 if name == "w_down" else 2
        # A view of one expert counts as contiguous with the strides of the wider one, and FSDP2 refuses those.
        part = local_data(weight).chunk(ranks, dim)[place].clone(memory_format=torch.contiguous_format)
        dealt = isinstance(weight, DTensor)
        grid, cuts = (mesh.root["ep", "tp"], [Shard(0), Shard(dim)]) if dealt else (mesh.root["tp"], [Shard(dim)])
        whole = DTensor.from_local(part, grid, cuts, run_check=False)
        experts.register_parameter(name, nn.Parameter(whole, requires_grad=weight.requires_grad))
    if not dealt:
        experts.forward = partial(_run_experts, experts)  # type: ignore[method-assign]


def _join_addends(moe: MoE, mesh: DeviceMesh) -> None:
    """Sum what each rank's columns of the experts make; routing is done alike on every rank.

    Every rank sees the whole sequence and makes an addend of the output. So the gradients of tokens and of combine
    weights are addends too, and the router, which needs the whole gradient of the latter, hands on a part of its own.
    """

    def split_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_replicated(inputs[0], mesh, Partial()).to_local(), *inputs[1:])

    def sum_gradient(_: nn.Module, inputs: tuple[Any, ...], routing: Routing) -> Routing:
        weights = _replicated(routing.weights, mesh, Replicate()).to_local(grad_placements=[Partial()])
        return routing._replace(weights=weights)

    def sum_gate_gradient(_: nn.Module, inputs: tuple[Any, ...], gate: Tensor) -> Tensor:
        return _replicated(gate, mesh, Replicate()).to_local(grad_placements=[Partial()])

    def pass_addends(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (_replicated(inputs[0], mesh, Partial()),)

    def sum_and_cut(_: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, RouterStats]) -> tuple[Tensor, Any]:
        addend = DTensor.from_local(output[0], mesh, [Partial()])
        return addend.redistribute(placements=[Shard(SEQUENCE)]).to_local(), output[1]

    moe.router.register_forward_pre_hook(split_gradient)
    moe.router.register_forward_hook(sum_gradient)
    if moe.shared is not None:
        moe.shared.register_forward_pre_hook(pass_addends)
    if moe.shared_gate is not None:
        moe.shared_gate.register_forward_pre_hook(split_gradient)
        moe.shared_gate.register_forward_hook(sum_gate_gradient)
    moe.register_forward_hook(sum_and_cut)


def _replicated(x: Tensor, mesh: DeviceMesh, gradient: Placement) -> DTensor:
    """What every rank has alike, and how its gradient leaves."""
    return DTensor.from_local(x, mesh, [Replicate()], grad_placements=[gradient])


def _run_experts(experts: Experts, x: Tensor, ends: Tensor) -> Tensor:
    """`Experts.forward` with this rank's columns of every expert: an addend of the output."""
    gate = None if experts.w_gate is None else local_part(experts.w_gate)
    return grouped_mlps(x, ends, gate, local_part(experts.w_up), local_part(experts.w_down), experts.activation)
