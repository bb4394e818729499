"""From hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap) (Gemma 2, 2024, sec. 2); the logits themselves without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def head_logits(hidden: Tensor, weight: Tensor, cap: float | None = None) -> Tensor:
    """fp32 logits (..., V) of hidden states (..., dim) under the head weight (V, dim).

    The product of low-precision inputs is taken in fp32: rounding logits to bf16 costs the loss two digits.
    """
    return soft_cap(F.linear(hidden.float(), weight.float()), cap)
