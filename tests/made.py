"""What operators make, for tests that count it."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """Numbers in each tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.sizes += [out.numel()] if isinstance(out, torch.Tensor) else []
        return out
