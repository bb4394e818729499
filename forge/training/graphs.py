"""Inputs at fixed addresses, as a recorded CUDA graph reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class FixedPlaces:
    """Parameters in the compute dtype, in the same memory at every step.

    A recorded graph reads a parameter where it lay then. Those of a donating step stay where they are; what is rounded
    to another dtype would lie elsewhere each time, and torch record the graph anew.
    """

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self._dtype = compute_dtype
        self._places: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters by name: themselves where they have the dtype, else their values in their places."""
        rounded = {name: p for name, p in params.items() if p.dtype != self._dtype}
        for name, p in rounded.items():
            if name not in self._places:
                self._places[name] = torch.empty_like(p, dtype=self._dtype)
        if rounded:
            torch._foreach_copy_([self._places[name] for name in rounded], list(rounded.values()))
        return {name: self._places[name] if name in rounded else p for name, p in params.items()}
