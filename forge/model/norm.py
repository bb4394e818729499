"""Normalisation: RMSNorm and LayerNorm, both computed in fp32 at least."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.nn import functional as F

from forge.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device="meta"))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        if _takes_few_passes(x, self.weight):
            normed: Tensor = _FewPasses.apply(x, self.weight, self.eps)
            return normed
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device="meta"))
        self.bias = nn.Parameter(torch.empty(dim, device="meta")) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # (..., dim) -> (..., dim)
        weight, bias = self.weight, self.bias
        low = x.dtype in (torch.bfloat16, torch.float16)
        if low and x.device.type == "cpu" and not isinstance(x, FakeTensor):  # a plan is of what CUDA keeps
            # The CPU's kernel would sum the gradients of weight and bias over the rows in bf16.
            wide_bias = None if bias is None else bias.float()
            return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, self.eps).to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream that the config names."""
    if config.norm == "layernorm":
        return LayerNorm(config.dim, config.norm_eps, config.bias)
    return RMSNorm(config.dim, config.norm_eps)


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors without a meaning of their own; a plan's have no storage."""


def _takes_few_passes(x: Tensor, weight: Tensor) -> bool:
    """Plain tensors on the CPU, outside of `torch.func` and of the compiler, which fuses the passes itself."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _FewPasses(Function):
    """`F.rms_norm`, which on the CPU is some twenty elementwise operators over memory, in a third of them or less.

    One of them does nearly all of the backward pass: torch's kernel for LayerNorm, told that the mean is 0. Its
    gradient in x is then RMSNorm's but for the term that comes of subtracting the mean, which is added back. Kept for
    it are x and one number a row; `F.rms_norm` keeps the normalised x besides.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / rms, (..., 1)
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # a second derivative may be asked for
            wanted = [tensor for tensor, wants in ((x, wants_x), (weight, wants_weight)) if wants]
            normed = F.rms_norm(x, weight.shape, weight, ctx.eps)
            found = iter(torch.autograd.grad(normed, wanted, grad, create_graph=True))
            return next(found) if wants_x else None, next(found) if wants_weight else None, None
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(inverse), inverse, weight, None, [wants_x, wants_weight, False]
        )
        if wants_x:
            grad_x.add_((grad @ weight).unsqueeze(-1).mul_(inverse), alpha=1 / x.shape[-1])
        return grad_x, grad_weight, None
