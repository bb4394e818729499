"""`TrainState.extras`: what a model learns without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import ModelConfig
from forge.model.moe import balanced_bias
from forge.pytree import PyTree


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
