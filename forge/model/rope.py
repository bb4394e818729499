"""Rotary position embedding (Su et al. 2021) with Llama-3's stretching of low frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge.config import ModelConfig

RotaryTable = tuple[Tensor, Tensor]
"""cos and signed sin, fp32 (S, head_width), or (B, 1, S, head_width) where sequences differ; see `apply_rope`."""


def rope_frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle a token, fp32 (head_width / 2,): theta^(-2i/d), low frequencies divided by the scaling factor.

    Wavelengths longer than original / low_freq_factor are stretched in full, shorter than original / high_freq_factor
    not at all, those between in proportion (Llama 3.1 reference, `apply_scaling`).
    """
    width = config.head_width
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling_factor == 1.0:
        return frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_max_seq_len * frequencies / (2 * math.pi)  # over the original length
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / config.rope_scaling_factor)


def rotary_table(positions: Tensor, config: ModelConfig) -> RotaryTable:
    """cos of the angles, twice, and (-sin, sin), at int64 positions (S,) or (B, S)."""
    frequencies = rope_frequencies(config, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * torch.cat((-frequencies, frequencies))
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)  # one head dimension to broadcast over
    return angles.cos(), angles.sin()  # cos(-x) is cos(x), sin(-x) is -sin(x)


def apply_rope(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn the pairs (x[i], x[i + d/2]) of every head by the table's angles.

    Args:
        x: (B, heads, S, d) in any float dtype; the result has the same.
        table: from `rotary_table`.
    """
    cos, signed_sin = (part.to(x.dtype) for part in table)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)  # (-x[i+d/2], x[i]) sin
