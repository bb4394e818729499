"""Orthogonalisation of matrices by Newton-Schulz iteration, batched."""

from __future__ import annotations

import torch
from torch import Tensor

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LIMIT = (1.875, -1.25, 0.375)
_SAFETY = 1.01
"""Room for rounding: the first polynomials grow steeply beyond 1."""


def coefficients(steps: int) -> list[tuple[float, float, float]]:
    """(a, b, c) of a x + b x^3 + c x^5 for each iteration: Polar Express (Amsel et al. 2025, arXiv 2505.16932).

    Each is the best quintic for the interval that the ones before it leave. Five of them bring singular values in
    [7e-4, 1] into [0.6, 1.13]; Muon's own (3.4445, -4.7750, 2.0315) need 1.3e-3 and end within [0.6, 1.21].
    """
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:steps]]
    return safe + [_LIMIT] * (steps - len(safe))


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype | None = None) -> Tensor:
    """Move the singular values of (..., rows, cols) near 1, keeping the singular vectors: U S V^T -> about U V^T.

    With 5 steps, singular values from 1e-3 of the largest up end in [0.6, 1.3]. The result has the input's
    dtype. Null directions stay at zero in fp32; bf16 fills them with rounding.

    Args:
        dtype: of the iterations; None = bf16 on CUDA, fp32 elsewhere.
    """
    x = matrices.to(torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-12)
    dtype = dtype or (torch.bfloat16 if x.is_cuda else torch.float32)
    return newton_schulz(x.to(dtype), steps).to(matrices.dtype)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Iterate in the dtype of `x` (..., rows, cols), whose Frobenius norm is 1.

    The first iteration divides by (sum s_i^8)^(1/8), which it has at hand and which is nearer to the largest singular
    value than the Frobenius norm: small singular values of a large matrix have less far to go.
    """
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0)
    if tall:
        x = x.mT
    for step, (a, b, c) in enumerate(coefficients(steps)):
        gram = x @ x.mT
        if step == 0:
            square = gram @ gram
            bound = torch.linalg.matrix_norm(square.float(), keepdim=True) ** 0.25
            bound = _SAFETY * bound.clamp(min=1e-3)  # at least rank^(-3/8), unless x is zero
            x, gram, square = ((part / bound**power).to(x.dtype) for part, power in ((x, 1), (gram, 2), (square, 4)))
            polynomial = b * gram + c * square
        else:
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).reshape(shape)
