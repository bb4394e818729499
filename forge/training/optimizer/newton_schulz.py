"""Orthogonalisation of matrices by Newton-Schulz iteration, batched."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic a x + b x^3 + c x^5 of Muon (Jordan et al. 2024): steep at 0, near 1 on the rest of [0, 1]."""


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Move the singular values of (..., rows, cols) near 1, keeping the singular vectors: U S V^T -> about U V^T.

    Computed in bf16 on CUDA, in fp32 elsewhere; the result has the input's dtype.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)
