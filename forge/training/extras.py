"""What routers did, and `TrainState.extras`: what a model learns without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import ModelConfig
from forge.model.moe import balanced_bias
from forge.pytree import PyTree
from forge.training.loss import LossSums


def init_extras(config: ModelConfig, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
    """What a model learns without a gradient, at the start: the routers' biases, zero, by block index."""
    if config.moe.router != "sigmoid":
        return {}
    layers = [layer for layer in range(config.n_layers) if config.is_moe_layer(layer)]
    biases = {str(layer): torch.zeros(config.moe.n_experts, device=device) for layer in layers}
    return {"router_bias": biases} if biases else {}


def router_bias(extras: PyTree) -> dict[str, dict[str, Tensor]]:
    """The argument of the model's forward pass that carries the routers' biases; none where there are none."""
    return {"router_bias": extras["router_bias"]} if "router_bias" in extras else {}


def balance_routers(extras: PyTree, counts: dict[str, Tensor] | None, good: Tensor, rate: float) -> PyTree:
    """Move the balancing bias of every sigmoid router once, from the counts of the whole global batch."""
    if counts is None or "router_bias" not in extras:
        return extras
    biases = extras["router_bias"]
    moved = {name: torch.where(good, balanced_bias(bias, counts[name], rate), bias) for name, bias in biases.items()}
    return {**extras, "router_bias": moved}


def routing(sums: LossSums, top_k: int) -> dict[str, Tensor]:
    """What the routers did with the global batch, as the fields of `StepResult`; nothing in a dense model.

    Args:
        top_k: experts that each token is sent to.
    """
    if sums.router_counts is None or sums.router_entropy is None or sums.router_dropped is None:
        return {}
    loads = torch.stack(list(sums.router_counts.values())).float()  # (layers, E)
    assigned = loads.sum().clamp(min=1)
    return {
        "moe_balance": (loads.amax(dim=1) / loads.mean(dim=1).clamp(min=1e-9)).mean(),
        "moe_entropy": sums.router_entropy * top_k / assigned,
        "moe_dropped": sums.router_dropped / assigned,
    }
