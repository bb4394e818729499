"""Mixture of experts: a router, experts as one grouped product, and what the router did, returned and not stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.model.mlp import ACTIVATIONS, MLP
from forge.model.sequence import SequenceCut

TINY = 1e-20
"""Added to sums of sigmoid scores, all of which can underflow (DeepSeek-V3's reference code)."""


class RouterStats(NamedTuple):
    """What one router did with T tokens."""

    loss: Tensor  # fp32 (): weighted auxiliary losses, differentiable
    entropy: Tensor  # fp32 (): of the distribution over the experts, nats, summed over the tokens
    counts: Tensor  # int64 (E,): assignments to each expert, dropped ones included
    dropped: Tensor  # int64 (): assignments beyond capacity


class Routing(NamedTuple):
    """Where T tokens go."""

    everywhere: Tensor  # int64 (T', k): experts of all tokens of the micro-batch, those of other ranks included
    experts: Tensor  # int64 (T, k)
    weights: Tensor  # fp32 (T, k), summing to 1 over k where `norm_topk_prob`
    stats: RouterStats


class Router(nn.Module):
    """Scores experts for each token in fp32 and picks the top k.

    softmax: the k largest probabilities (Mixtral 2024), balanced by the Switch loss E sum f_i P_i (Fedus et al. 2021,
    eq. 4). sigmoid: the k largest score + bias, combined by the scores without the bias, which is moved after each
    update towards equal loads (DeepSeek-V3 2024, sec. 2.1.2). Either way renormalised, but for `norm_topk_prob` off.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.moe.n_experts, config.dim, device="meta"))
        self.config = config.moe

    def forward(self, x: Tensor, bias: Tensor | None, everywhere: Callable[[Tensor], Tensor] | None = None) -> Routing:
        """x (T, dim), bias (E,).

        Args:
            everywhere: experts (T, k) of the tokens here -> (T', k) of the whole micro-batch, where it is cut.
        """
        logits = F.linear(x.float(), self.weight.float())
        if self.config.router == "softmax":
            scores = logits.softmax(dim=-1)
            experts = scores.topk(self.config.top_k, dim=-1).indices
            shares = scores
        else:
            scores = logits.sigmoid()
            preferred = scores if bias is None else scores + bias
            experts = preferred.topk(self.config.top_k, dim=-1).indices
            shares = scores / (scores.sum(dim=-1, keepdim=True) + TINY)
        weights = scores.gather(-1, experts)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        counts = assignments(experts, self.config.n_experts)
        chosen = experts if everywhere is None else everywhere(experts)
        of_all = counts if everywhere is None else assignments(chosen, self.config.n_experts)
        loss = self._losses(logits, shares, of_all)
        stats = RouterStats(loss, _entropy(shares), counts, torch.zeros_like(counts.sum()))
        return Routing(chosen, experts, weights, stats)

    def _losses(self, logits: Tensor, shares: Tensor, counts: Tensor) -> Tensor:
        """Switch balance loss (1 when balanced) and ST-MoE z-loss, each with its weight.

        With the counts of the whole micro-batch, the mean over the ranks that it is cut over is the loss of the whole.
        """
        loss = logits.new_zeros(())
        if self.config.balance_weight:
            fractions = counts / counts.sum()
            loss = loss + self.config.balance_weight * self.config.n_experts * (fractions * shares.mean(dim=0)).sum()
        if self.config.router_z_loss_weight:
            loss = loss + self.config.router_z_loss_weight * logits.logsumexp(dim=-1).square().mean()
        return loss


def _entropy(shares: Tensor) -> Tensor:
    """-sum p ln p over experts and tokens of distributions (T, E), without a gradient."""
    return torch.special.entr(shares.detach()).sum()


def assignments(experts: Tensor, count: int) -> Tensor:
    """How often each of `count` experts is chosen in experts (T, k), int64 (count,)."""
    return experts.new_zeros(count).scatter_add(0, experts.flatten(), torch.ones_like(experts).flatten())


class Experts(nn.Module):
    """E gated or plain MLPs over tokens sorted by expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, dim, hidden = config.moe.n_experts, config.dim, config.expert_width
        self.w_gate: nn.Parameter | None = None
        if config.gated:
            self.w_gate = nn.Parameter(torch.empty(experts, dim, hidden, device="meta"))
        self.w_up = nn.Parameter(torch.empty(experts, dim, hidden, device="meta"))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, dim, device="meta"))
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (N, dim), the tokens of expert e being rows ends[e-1]..ends[e] (int32 (E,)) -> (N, dim)."""
        return grouped_mlps(x, ends, self.w_gate, self.w_up, self.w_down, self.activation)


def check_expert_widths(config: ModelConfig, dtype: torch.dtype, ranks: int = 1) -> None:
    """Refuse widths that torch's grouped product does not take: its rows are of whole 16 bytes.

    Args:
        dtype: of the products.
        ranks: over which tensor parallelism cuts the experts' hidden width.

    Raises:
        ConfigError: names the width.
    """
    if not config.moe.n_experts:
        return
    multiple = 16 // dtype.itemsize
    widths = {"model.dim": config.dim, "the experts' width on each rank": config.expert_width // ranks}
    for name, width in widths.items():
        if width % multiple:
            raise ConfigError(
                f"{name} = {width} is no multiple of {multiple}, as experts need in {dtype}: change model.dim or"
                " model.moe.expert_hidden_dim"
            )


def grouped_mlps(
    x: Tensor,
    ends: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """MLP e, of weights (E, dim, hidden) and (E, hidden, dim), over rows ends[e-1]..ends[e] of x (N, dim)."""
    up = F.grouped_mm(x, w_up, offs=ends)
    hidden = activation(up) if w_gate is None else activation(F.grouped_mm(x, w_gate, offs=ends)) * up
    return F.grouped_mm(hidden, w_down, offs=ends)


class MoE(nn.Module):
    """Router, routed experts, and shared experts that every token passes through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.moe.n_shared_experts
        self.shared = MLP(config, shared * config.expert_width) if shared else None
        gated = config.moe.shared_expert_gate
        self.shared_gate = nn.Linear(config.dim, 1, bias=False, device="meta") if gated else None
        self.capacity_factor = config.moe.capacity_factor

    def forward(
        self, x: Tensor, bias: Tensor | None = None, cut: SequenceCut | None = None
    ) -> tuple[Tensor, RouterStats]:
        """x (B, S, dim) -> (B, S, dim) and what the router did."""
        tokens = x.flatten(0, -2)

        everywhere = None if cut is None else partial(self._everywhere, x.shape[:-1], cut)
        chosen, experts, weights, stats = self.router(tokens, bias, everywhere)
        if self.capacity_factor is not None:
            kept = self._within_capacity(chosen, self.capacity_factor).view(*x.shape[:-2], -1, experts.shape[1])
            kept = (kept if cut is None else cut.take(kept, -2)).view_as(experts)
            weights = weights.where(kept, 0.0)
            stats = stats._replace(dropped=(~kept).sum())
        order = experts.flatten().argsort(stable=True)  # by expert, earliest token first
        ends = stats.counts.cumsum(0)
        weights = weights.flatten()[order]
        source = order // experts.shape[1]
        out = self.experts(tokens[source], ends.to(torch.int32))
        mixed = torch.zeros_like(tokens).index_add(0, source, out * weights.unsqueeze(-1).to(out.dtype))
        if self.shared is not None:
            shared = self.shared(tokens)
            mixed = mixed + (shared if self.shared_gate is None else self.shared_gate(tokens).sigmoid() * shared)
        return mixed.view_as(x), stats

    @staticmethod
    def _everywhere(shape: torch.Size, cut: SequenceCut, experts: Tensor) -> Tensor:
        """Experts (T, k) of the tokens here, of shape (B, S) -> those of the whole sequences, in order."""
        return cut.gather(experts.view(*shape, -1), -2).flatten(0, -2)

    def _within_capacity(self, experts: Tensor, factor: float) -> Tensor:
        """Which of the assignments (T, k) are among the first ceil(T k / E * factor) of their expert, bool (T, k).

        All k slots count together, the earliest token first.
        """
        flat, count = experts.flatten(), self.router.config.n_experts
        capacity = math.ceil(flat.numel() / count * factor)
        order = flat.argsort(stable=True)
        by_expert = flat[order]
        counts = assignments(experts, count)
        first = counts.cumsum(0) - counts
        place = torch.arange(flat.numel(), device=flat.device) - first[by_expert]
        return torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, place < capacity).view_as(experts)


def balanced_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """One step of the balancing bias: up by `rate` where an expert got less than the mean load, down where more."""
    load = counts.to(torch.float32)
    return bias + rate * torch.sign(load.mean() - load)


@contextmanager
def without_capacity(model: nn.Module) -> Generator[None, None, None]:
    """Experts that take every token for as long as the context lasts."""
    before = [(module, module.capacity_factor) for module in model.modules() if isinstance(module, MoE)]
    for module, _ in before:
        module.capacity_factor = None
    try:
        yield
    finally:
        for module, factor in before:
            module.capacity_factor = factor
