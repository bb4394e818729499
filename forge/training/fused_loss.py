"""Head and cross entropy in one: the gradient is made chunk by chunk in the forward pass, the logits never exist.

Peak memory is one chunk of logits instead of (tokens, vocabulary), and the softmax is computed once instead of twice.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, NoReturn

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional as F

from forge.data.batch import IGNORE
from forge.errors import ForgeError
from forge.model.head import soft_cap

FEW_LOGITS = 2**17
"""Up to so many, passes over them cost less than the operators that save passes."""


@frozen
class LossOptions:
    """What is added to plain cross entropy."""

    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float | None = None


_PLAIN = LossOptions()


class TokenLosses(NamedTuple):
    """Losses of N positions; zero where the label is ignored."""

    total: Tensor  # fp32 (): sum of the objective, the differentiable one
    ce: Tensor  # fp32 (N,): cross entropy, without smoothing
    squared_lse: Tensor  # fp32 (N,): logsumexp(logits)^2, the z-loss before its weight; without one fused leaves it 0


def token_losses(logits: Tensor, labels: Tensor, options: LossOptions) -> TokenLosses:
    """Losses from fp32 logits (N, V), already capped, and int64 labels (N,); differentiable any number of times.

    Smoothing follows `F.cross_entropy(label_smoothing=)`, the z-loss PaLM (Chowdhery et al. 2022, sec. 5).
    """
    target = labels != IGNORE
    log_probs = F.log_softmax(logits, dim=-1)
    at = labels.where(target, 0).unsqueeze(-1)
    ce = -log_probs.gather(-1, at).squeeze(-1)
    lse = logits.gather(-1, at).squeeze(-1) + ce
    ce, squared_lse = ce.where(target, 0.0), lse.square().where(target, 0.0)
    total = ce.sum()
    if options.label_smoothing:
        even = -log_probs.mean(dim=-1).where(target, 0.0).sum()
        total = (1 - options.label_smoothing) * total + options.label_smoothing * even
    if options.z_loss_weight:
        total = total + options.z_loss_weight * squared_lse.sum()
    return TokenLosses(total, ce.detach(), squared_lse.detach())


def fused_losses(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, chunk: int) -> TokenLosses:
    """Losses of hidden states (N, dim) under the head weight (V, dim), once differentiable in both.

    In fp32 and without options few logits are made at once, in the fewest operators, and differentiable again. Works in
    fp32 or bf16 (products and log-sum-exp in fp32), under `torch.func.grad`, `vmap` and `torch.compile`.

    Args:
        labels: int64 (N,), IGNORE = not a target.
        chunk: tokens whose logits exist at a time.
    """
    tokens, few = hidden.shape[0], hidden.shape[0] * weight.shape[0] <= FEW_LOGITS
    if few and tokens <= chunk and options == _PLAIN and hidden.dtype == weight.dtype == torch.float32:
        # `token_losses` of the logits, without the squared_lse that nobody reads here: that takes a third longer.
        log_probs = torch.log_softmax(hidden @ weight.T, dim=-1)
        ce = F.nll_loss(log_probs, labels, ignore_index=IGNORE, reduction="none")
        return TokenLosses(ce.sum(), ce.detach(), torch.zeros_like(ce))
    grad = torch.is_grad_enabled()
    wants = (grad and hidden.requires_grad, grad and weight.requires_grad)
    total, ce, squared_lse, _, _ = _FusedLosses.apply(hidden, weight, labels, options, chunk, *wants)
    return TokenLosses(total, ce, squared_lse)


class _FusedLosses(Function):
    """Returns (total, ce, squared_lse, d total / d hidden, d total / d weight)."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: LossOptions,
        chunk: int,
        wants_hidden: bool,
        wants_weight: bool,
    ) -> tuple[Tensor, ...]:
        return _forward_and_gradient(hidden, weight, labels, options, chunk, wants_hidden, wants_weight)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else zeros of the size of the head, for outputs without one
        ctx.save_for_backward(*output[3:], *inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, hidden, weight = ctx.saved_tensors
        # Without a graph of the backward pass there is no second derivative to refuse; compiled code has none either,
        # and Dynamo cannot trace one Function inside another.
        scale = _Scale.apply if torch.is_grad_enabled() and not torch.compiler.is_compiling() else scaled
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return (
            scale(grad_total, grad_hidden, hidden, weight) if needs_hidden else None,
            scale(grad_total, grad_weight, hidden, weight) if needs_weight else None,
            None, None, None, None, None,
        )  # fmt: skip

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """One call a sample: each is a few large matrix products, which batching would not speed up."""

        def pick(arg: Any, dim: int | None, i: int) -> Any:
            return arg if dim is None else arg.select(dim, i)

        rows = [
            _FusedLosses.apply(*(pick(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * 5


# `apply` binds its arguments to the signature of forward, and working that out anew at every call takes 50 us.
_FusedLosses.forward.__signature__ = inspect.signature(_FusedLosses.forward)  # type: ignore[attr-defined]


def scaled(factor: Tensor, value: Tensor, *depends_on: Tensor) -> Tensor:
    """value * factor, fp32 (), in value's dtype; the factor is not rounded to it, which would change every length."""
    if value.dtype == torch.float32:
        return value * factor
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return (value.float() * factor).to(value.dtype)
    # A factor with a dimension makes the product one of fp32, which CUDA rounds as it is written, without a copy.
    return torch.mul(value, factor.reshape(1), out=torch.empty_like(value))


class _Scale(Function):
    """`scaled`, whose own derivative is refused: value is a gradient whose dependence on its inputs is lost."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, value: Tensor, *depends_on: Tensor) -> Tensor:
        return scaled(factor, value)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise ForgeError("the fused loss can be differentiated once: for second derivatives choose --train.loss plain")


def _forward_and_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, ...]:
    tokens, vocab = hidden.shape[0], weight.shape[0]
    total = hidden.new_zeros((), dtype=torch.float32)
    ce, squared_lse = hidden.new_zeros(2, tokens, dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
    grad_weight: Tensor | None = None
    low = hidden.is_cuda and hidden.dtype != torch.float32
    head = weight if low else weight.float()
    buffers = _Buffers(hidden, min(chunk, tokens), vocab, options)
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        states = hidden[rows] if low else hidden[rows].float()
        found = _chunk_losses(states, head, labels[rows], options, buffers)
        total += found.total
        ce[rows] = found.ce
        if options.z_loss_weight:
            squared_lse[rows] = found.squared_lse
        if not (wants_hidden or wants_weight):
            continue
        gradient = logit_gradient(found.probs, found.logits, found.lse, found.at, None, vocab, options).to(head.dtype)
        ignored = found.ignored.unsqueeze(-1)  # masks the narrow factors: one pass over (rows, vocabulary) less
        if wants_hidden:
            grad_hidden[rows] = (gradient @ head).masked_fill_(ignored, 0.0)
        if wants_weight:
            grad_weight = add_mm(grad_weight, gradient.T, states.masked_fill(ignored, 0.0))
    if grad_weight is None:
        grad_weight = torch.zeros_like(weight) if wants_weight else weight.new_empty(0)
    return total, ce, squared_lse, grad_hidden, grad_weight.to(weight.dtype)


class _Buffers:
    """Memory for the logits of all chunks in turn: fresh memory would cost a page fault for every 4 KiB of logits."""

    def __init__(self, hidden: Tensor, rows: int, vocab: int, options: LossOptions) -> None:
        real = type(hidden) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()  # has values to read
        large = rows * vocab > FEW_LOGITS
        self.in_place = real and large and not hidden.is_cuda and options.logit_softcap is None
        self.logits = hidden.new_empty(rows, vocab, dtype=torch.float32)
        self.probs = self.logits if self.in_place else torch.empty_like(self.logits)


class _ChunkLosses(NamedTuple):
    """What n tokens cost, and what their gradient is made of."""

    total: Tensor  # fp32 (): the objective
    ce: Tensor  # fp32 (n,)
    squared_lse: Tensor  # fp32 (n,)
    lse: Tensor  # fp32 (n,); ce where neither smoothing nor z-loss need it
    probs: Tensor  # fp32 (n, V)
    logits: Tensor  # fp32 (n, V), overwritten by the probabilities where that is enough
    at: Tensor  # int64 (n, 1): the target, 0 where it is ignored
    ignored: Tensor  # bool (n,)


def _chunk_losses(
    states: Tensor, head: Tensor, labels: Tensor, options: LossOptions, buffers: _Buffers
) -> _ChunkLosses:
    n, smooth = states.shape[0], options.label_smoothing
    logits = soft_cap(matmul_fp32(states, head.T, buffers.logits[:n]), options.logit_softcap)
    ignored = labels == IGNORE
    at = labels.masked_fill(ignored, 0).unsqueeze(-1)
    wants_lse = bool(smooth or options.z_loss_weight)
    at_target = logits.gather(-1, at).squeeze(-1) if wants_lse or buffers.in_place else None
    mean_logit = logits.mean(dim=-1) if smooth else None
    if buffers.in_place:
        assert at_target is not None
        probs, nll = _softmax_in_place(logits, at, at_target, states, head)
        ce = nll.masked_fill(ignored, 0.0)
    else:
        log_probs = torch.log_softmax(logits, dim=-1, out=buffers.probs[:n])
        ce = F.nll_loss(log_probs, labels, ignore_index=IGNORE, reduction="none")
        nll = -log_probs.gather(-1, at).squeeze(-1) if wants_lse else ce
        probs = log_probs.exp_()
    lse = nll if at_target is None else at_target + nll
    squared_lse, total = ce, ce.sum()
    if mean_logit is not None:
        total = (1 - smooth) * total + smooth * (lse - mean_logit).masked_fill(ignored, 0.0).sum()
    if options.z_loss_weight:
        squared_lse = lse.square().masked_fill(ignored, 0.0)
        total = total + options.z_loss_weight * squared_lse.sum()
    return _ChunkLosses(total, ce, squared_lse, lse, probs, logits, at, ignored)


def _softmax_in_place(
    logits: Tensor, at: Tensor, at_target: Tensor, states: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Overwrite logits (n, V) by their softmax; also -log p of the targets (n,), exact where p underflows too.

    Half the passes of log_softmax and exp, and no second buffer. On the CPU only: it reads a value back.
    """
    probs = torch.softmax(logits, dim=-1, out=logits)
    p = probs.gather(-1, at).squeeze(-1)
    nll = -p.log()
    far = (p < 1e-30).nonzero().squeeze(-1)
    if far.numel():  # logsumexp from the likeliest word instead, whose p is at least 1 / V
        top, best = probs[far].max(dim=-1)
        nll[far] = (states[far] * head[best]).sum(dim=-1) - top.log() - at_target[far]
    return probs, nll


def logit_gradient(
    probs: Tensor,
    logits: Tensor,
    lse: Tensor,
    at: Tensor,
    here: Tensor | None,
    vocab: int | Tensor,
    options: LossOptions,
) -> Tensor:
    """Of the total in the logits before their cap, p (1 + 2 z lse) - smoothed target; overwrites `probs` (n, V).

    Args:
        logits: fp32 (n, V), capped; read only where there is a cap.
        lse: fp32 (n,).
        at: int64 (n, 1), the target's column.
        here: (n, 1), 1 where that column is among these, else 0; None = it always is.
        vocab: words of the whole vocabulary.
    """
    smooth = options.label_smoothing
    if options.z_loss_weight:
        probs *= (1 + 2 * options.z_loss_weight * lse).unsqueeze(-1)
    if smooth:
        probs -= smooth / vocab
    off = smooth - 1.0
    probs.scatter_add_(-1, at, probs.new_full(at.shape, off) if here is None else here * off)
    if options.logit_softcap is not None:
        probs *= 1 - (logits / options.logit_softcap).square()
    return probs


def matmul_fp32(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right into fp32 `out`; low precision only on CUDA, whose products can accumulate into fp32."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def add_mm(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, fp32; None is zero."""
    if total is None:
        return torch.mm(left, right) if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float32:
        return total.addmm_(left, right)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
