"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back (Lepikhin et al. 2020).

Every rank reads its own sequences. The backward pass brings the gradient of every token of the group to the experts
that it went to: an expert's gradient is a sum over the group's tokens, and is reduced over the other ranks only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from forge.config import MoEConfig
from forge.distributed.mesh import Mesh
from forge.distributed.shards import local_data, local_part
from forge.errors import ConfigError
from forge.model import Transformer
from forge.model.moe import Experts, MoE, grouped_mlps


def apply_expert_parallel(model: Transformer, mesh: Mesh) -> None:
    """Cut the experts of every MoE layer over `ep` in place; on the meta device, after TP and before FSDP2.

    Raises:
        ConfigError: there are no experts, or not as many on every rank.
    """
    ranks = mesh.size("ep")
    if ranks == 1:
        return
    check_experts(model.config.moe, ranks)
    for block in model.blocks.children():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, MoE):
            _cut(mlp.experts, mesh)
            mlp.experts.forward = partial(_dispatch, mlp.experts, mesh.group("ep"))  # type: ignore[method-assign]


def check_experts(config: MoEConfig, ranks: int) -> None:
    """Refuse experts that cannot be dealt out evenly.

    Raises:
        ConfigError: they cannot.
    """
    if not config.n_experts:
        raise ConfigError(
            f"distributed.ep = {ranks}, but the model has no experts (model.moe.n_experts = 0):"
            " give these ranks to distributed.dp_shard"
        )
    if config.n_experts % ranks:
        raise ConfigError(
            f"model.moe.n_experts = {config.n_experts} is not divisible by distributed.ep = {ranks}:"
            " lower ep to a divisor of it"
        )


def _cut(experts: Experts, mesh: Mesh) -> None:
    """Replace each weight (E, ...), or TP's share of it, by this rank's experts, as a DTensor that knows the whole."""
    for name, weight in list(experts.named_parameters()):
        local = local_data(weight).tensor_split(mesh.size("ep"))[mesh.rank("ep")]
        of_tp = weight.placements if isinstance(weight, DTensor) else ()
        grid, placements = mesh.root["ep", "tp"] if of_tp else mesh.root["ep"], (Shard(0), *of_tp)
        cut = DTensor.from_local(local, grid, placements, run_check=False, shape=weight.shape, stride=weight.stride())
        experts.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))


def _dispatch(experts: Experts, group: dist.ProcessGroup, x: Tensor, ends: Tensor) -> Tensor:
    """`Experts.forward` of experts that lie on the ranks of a group: x (N, dim) sorted by expert -> (N, dim)."""
    counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64).view(group.size(), -1)  # of rank's expert, from here
    received = torch.empty_like(counts)  # of this rank's expert, from rank
    dist.all_to_all_single(received, counts, group=group)
    sizes: list[list[int]] = torch.stack((counts.sum(1), received.sum(1))).tolist()  # the one synchronisation
    there, here = sizes
    rows = _AllToAll.apply(x, there, here, group)
    local = torch.arange(received.numel(), device=x.device) % received.shape[1]
    order = local.repeat_interleave(received.flatten(), output_size=sum(here)).argsort(stable=True)
    rows, here_ends = rows.index_select(0, order), received.sum(0).cumsum(0).to(torch.int32)
    if not sum(here):  # no token came; the product of no rows has no gradient, that of a row of zeros is zero
        rows, here_ends = functional.pad(rows, (0, 0, 0, 1)), torch.ones_like(here_ends)
    out = grouped_mlps(
        rows,
        here_ends,
        None if experts.w_gate is None else local_part(experts.w_gate),
        local_part(experts.w_up),
        local_part(experts.w_down),
        experts.activation,
    )
    return _AllToAll.apply(out.index_select(0, order.argsort()), here, there, group)


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, `there[r]` to rank r, and `here[r]` from it; backward returns the gradients."""

    @staticmethod
    def forward(x: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
        # The functional form, so that selective recomputation can keep what came.
        return funcol.wait_tensor(funcol.all_to_all_single(x.contiguous(), here, there, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, list[int], list[int], dist.ProcessGroup], output: Tensor) -> None:
        _, ctx.there, ctx.here, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.here, ctx.there, ctx.group), None, None, None
