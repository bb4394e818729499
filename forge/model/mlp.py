"""The dense feed-forward layer, gated (Shazeer 2020) or plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config import ModelConfig


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu,
    "gelu": _gelu,
    "relu2": _relu2,
}
"""Nonlinearity by `model.mlp`; for the gated ones it acts on the gate."""


class MLP(nn.Module):
    """w_down(act(w_gate x) * w_up x), or w_down(act(w_up x)) without a gate."""

    def __init__(self, config: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.dim, hidden, bias=config.bias, device="meta") if config.gated else None
        self.w_up = nn.Linear(config.dim, hidden, bias=config.bias, device="meta")
        self.w_down = nn.Linear(hidden, config.dim, bias=config.bias, device="meta")
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        if self.w_gate is None:
            return self.w_down(self.activation(self.w_up(x)))
        return self.w_down(self.activation(self.w_gate(x)) * self.w_up(x))
