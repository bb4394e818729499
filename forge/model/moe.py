"""Mixture of experts: a router, experts as one grouped product, and what the router did, returned and not stored."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config import ModelConfig
from forge.model.mlp import ACTIVATIONS, MLP


class RouterStats(NamedTuple):
    """What one router did with T tokens."""

    loss: Tensor  # fp32 (): weighted auxiliary losses, differentiable
    counts: Tensor  # int64 (E,): assignments to each expert, dropped ones included
    dropped: Tensor  # int64 (): assignments beyond capacity


class Routing(NamedTuple):
    """Where T tokens go."""

    experts: Tensor  # int64 (T, k)
    weights: Tensor  # fp32 (T, k), summing to 1 over k
    stats: RouterStats


class Router(nn.Module):
    """Scores experts for each token in fp32 and picks the top k.

    softmax: the k largest probabilities, renormalised (Mixtral 2024), balanced by the Switch loss E sum f_i P_i (Fedus
    et al. 2021, eq. 4). sigmoid: the k largest score + bias, combined by the scores without the bias, which is moved
    after each update towards equal loads (DeepSeek-V3 2024, sec. 2.1.2).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.moe.n_experts, config.dim, device="meta"))
        self.config = config.moe

    def forward(self, x: Tensor, bias: Tensor | None) -> Routing:  # x (T, dim), bias (E,)
        logits = F.linear(x.float(), self.weight.float())
        if self.config.router == "softmax":
            scores = logits.softmax(dim=-1)
            experts = scores.topk(self.config.top_k, dim=-1).indices
            shares = scores
        else:
            scores = logits.sigmoid()
            preferred = scores if bias is None else scores + bias
            experts = preferred.topk(self.config.top_k, dim=-1).indices
            shares = scores / scores.sum(dim=-1, keepdim=True)
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = torch.zeros_like(logits[0], dtype=torch.int64)
        counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(experts).flatten())
        loss = self._losses(logits, shares, counts)
        return Routing(experts, weights, RouterStats(loss, counts, torch.zeros_like(counts.sum())))

    def _losses(self, logits: Tensor, shares: Tensor, counts: Tensor) -> Tensor:
        """Switch balance loss (1 when balanced) and ST-MoE z-loss, each with its weight."""
        loss = logits.new_zeros(())
        if self.config.balance_weight:
            fractions = counts / counts.sum()
            loss = loss + self.config.balance_weight * self.config.n_experts * (fractions * shares.mean(dim=0)).sum()
        if self.config.router_z_loss_weight:
            loss = loss + self.config.router_z_loss_weight * logits.logsumexp(dim=-1).square().mean()
        return loss


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
        up = F.grouped_mm(x, self.w_up, offs=ends)
        if self.w_gate is None:
            hidden = self.activation(up)
        else:
            hidden = self.activation(F.grouped_mm(x, self.w_gate, offs=ends)) * up
        return F.grouped_mm(hidden, self.w_down, offs=ends)


class MoE(nn.Module):
    """Router, routed experts, and shared experts that every token passes through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = config.moe.n_shared_experts
        self.shared = MLP(config, shared * config.expert_width) if shared else None
        self.capacity_factor = config.moe.capacity_factor

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """x (B, S, dim) -> (B, S, dim) and what the router did."""
        tokens = x.flatten(0, -2)
        experts, weights, stats = self.router(tokens, bias)
        order = experts.flatten().argsort(stable=True)  # by expert, earliest token first
        ends = stats.counts.cumsum(0)
        weights = weights.flatten()[order]
        if self.capacity_factor is not None:
            weights, dropped = self._drop(weights, experts.flatten()[order], ends, stats.counts)
            stats = stats._replace(dropped=dropped)
        source = order // experts.shape[1]
        out = self.experts(tokens[source], ends.to(torch.int32))
        mixed = torch.zeros_like(tokens).index_add(0, source, out * weights.unsqueeze(-1).to(out.dtype))
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        return mixed.view_as(x), stats

    def _drop(self, weights: Tensor, experts: Tensor, ends: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Zero the weights of assignments beyond ceil(T k / E * factor) an expert, over all k slots together."""
        assert self.capacity_factor is not None
        capacity = math.ceil(experts.numel() / counts.numel() * self.capacity_factor)
        place = torch.arange(experts.numel(), device=experts.device) - (ends - counts)[experts]
        kept = place < capacity
        return weights.where(kept, 0.0), (~kept).sum()


def balanced_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """One step of the balancing bias: up by `rate` where an expert got less than the mean load, down where more."""
    load = counts.to(torch.float32)
    return bias + rate * torch.sign(load.mean() - load)
