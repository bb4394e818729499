"""Embeddings: rows of a table by token or position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


class Embedding(nn.Embedding):
    """`nn.Embedding` on the meta device, whose gradient is summed in fp32 at least.

    On the CPU torch sums the gradients of a token's occurrences in the table's own dtype, and in bf16 a sum stops
    growing at some 256 times its addends: frequent tokens would hardly learn. There the rows are taken of a table in
    fp32, but for one that tensor parallelism cuts, whose rows would then be summed over the ranks in fp32 too. Kernels
    for CUDA sum some tens of addends at a time in fp32 by themselves.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim, device="meta")

    def forward(self, input: Tensor) -> Tensor:  # (...), int64 -> (..., dim)
        weight = self.weight
        learns = weight.requires_grad and torch.is_grad_enabled()
        low = weight.dtype in (torch.bfloat16, torch.float16) and weight.device.type == "cpu"
        if low and learns and not isinstance(weight, DTensor):
            return F.embedding(input, weight.float()).to(weight.dtype)
        return F.embedding(input, weight)
