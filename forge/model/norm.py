"""Normalisation: RMSNorm and LayerNorm, both computed in fp32 whatever the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device="meta"))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device="meta"))
        self.bias = nn.Parameter(torch.empty(dim, device="meta")) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream that the config names."""
    if config.norm == "layernorm":
        return LayerNorm(config.dim, config.norm_eps, config.bias)
    return RMSNorm(config.dim, config.norm_eps)
