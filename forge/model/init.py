"""Initial weights as a pure function of (seed, parameter name), the same for any layout and device."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from forge.config import ModelConfig


def initial_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of a matrix: what writes to the residual stream is scaled by depth (GPT-2, sec. 2.3).

    Under muP that of hidden matrices falls with the root of the width, that of routers with the width; embeddings and
    the head keep theirs (Yang et al. 2022, tables 3 and 8).
    """
    module = name.removesuffix(".weight").split(".")[-1]
    if module in ("embed", "position_embed", "head"):
        return config.init_std
    if module in ("router", "shared_gate"):
        return config.init_std / config.width_multiplier
    std = config.init_std / math.sqrt(config.width_multiplier)
    return std / math.sqrt(2 * config.n_layers) if module in ("wo", "w_down") else std


def init_tensor(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """One parameter in fp32 on the CPU: normal matrices, ones for norms, zeros for biases."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(std=initial_std(name, config), generator=generator)


def init_params(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """All parameters of a model, by fully-qualified name; tied ones once.

    Each depends on the seed and its own name only, so adding a layer or cutting the model over ranks changes no other.
    """
    return {
        name: init_tensor(name, parameter.shape, config, seed).to(device=device, dtype=dtype)
        for name, parameter in model.named_parameters()
    }
