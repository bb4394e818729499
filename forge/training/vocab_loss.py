"""The fused loss under a head whose rows are cut over ranks: no rank ever holds a token's logits in full.

Each rank makes the logits of its own rows, chunk by chunk. Two small messages a chunk, the largest logit and then the
sums, give every rank the same losses (Shoeybi et al. 2019, sec. 3; "loss parallel").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from forge.data.batch import IGNORE
from forge.model.head import soft_cap
from forge.training.fused_loss import LossOptions, TokenLosses, add_mm, logit_gradient, matmul_fp32, scaled


def vocab_parallel_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions,
    chunk: int,
    group: dist.ProcessGroup,
    vocab_start: int,
) -> TokenLosses:
    """Losses of hidden states (N, dim) under the head rows (V_local, dim) of each rank, once differentiable in both.

    Every rank of the group calls it with the same hidden states and labels and gets the same losses. The gradient of
    the hidden states is this rank's addend: whoever handed them out to the group sums it over the group.

    Args:
        labels: int64 (N,) in the whole vocabulary, IGNORE = not a target.
        chunk: tokens whose logits exist at a time.
        group: the ranks whose rows make up the vocabulary.
        vocab_start: the token id of the first row here.
    """
    grad = torch.is_grad_enabled()
    wants = (grad and hidden.requires_grad, grad and weight.requires_grad)
    total, ce, squared_lse, _, _ = _VocabParallelLosses.apply(
        hidden, weight, labels, options, chunk, group, vocab_start, *wants
    )
    return TokenLosses(total, ce, squared_lse)


class _VocabParallelLosses(Function):
    """Returns (total, ce, squared_lse, d total / d hidden from these rows, d total / d weight)."""

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: LossOptions,
        chunk: int,
        group: dist.ProcessGroup,
        vocab_start: int,
        wants_hidden: bool,
        wants_weight: bool,
    ) -> tuple[Tensor, ...]:
        rows, width = hidden.shape[0], weight.shape[0]
        total = hidden.new_zeros((), dtype=torch.float32)
        ce, squared_lse = hidden.new_zeros(2, rows, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else weight.new_empty(0)
        low = hidden.is_cuda and hidden.dtype != torch.float32
        head = weight if low else weight.float()
        buffer = hidden.new_empty(min(chunk, rows), width, dtype=torch.float32)
        for start in range(0, rows, chunk):
            here = slice(start, min(start + chunk, rows))
            states = hidden[here] if low else hidden[here].float()
            logits = soft_cap(matmul_fp32(states, head.T, buffer[: states.shape[0]]), options.logit_softcap)
            found = _chunk_losses(logits, labels[here], options, group, vocab_start)
            total += found.total
            ce[here], squared_lse[here] = found.ce, found.squared_lse
            if not (wants_hidden or wants_weight):
                continue
            gradient = _gradient(logits, labels[here], options, found, vocab_start).to(head.dtype)
            if wants_hidden:
                grad_hidden[here] = gradient @ head
            if wants_weight:
                grad_weight = add_mm(grad_weight, gradient.T, states)
        return total, ce, squared_lse, grad_hidden, grad_weight.to(weight.dtype)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else zeros of the size of the head, for outputs without one
        ctx.save_for_backward(*output[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return (
            scaled(grad_total, grad_hidden) if needs_hidden else None,
            scaled(grad_total, grad_weight) if needs_weight else None,
            None, None, None, None, None, None, None,
        )  # fmt: skip


class _ChunkLosses(NamedTuple):
    """What n tokens cost, the same on every rank of the group."""

    total: Tensor  # fp32 (): the objective
    ce: Tensor  # fp32 (n,)
    squared_lse: Tensor  # fp32 (n,)
    lse: Tensor  # fp32 (n,)
    vocab: Tensor  # fp32 (): rows of all ranks


def _chunk_losses(
    logits: Tensor, labels: Tensor, options: LossOptions, group: dist.ProcessGroup, vocab_start: int
) -> _ChunkLosses:
    """Losses from this rank's columns (n, V_local) of the logits."""
    target = labels != IGNORE
    at, owned = _columns(labels, vocab_start, logits.shape[1])
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(
        (
            torch.exp(logits - largest.unsqueeze(-1)).sum(dim=-1),
            logits.gather(-1, at).squeeze(-1).where(owned, 0.0),
            logits.sum(dim=-1),
            torch.full_like(largest, logits.shape[1]),
        )
    )
    dist.all_reduce(sums, group=group)
    scale, at_target, over_vocab, vocab = sums
    # Subtract before adding the logarithm: logits of 3e4 have no digits left for it.
    ce = (largest - at_target + scale.log()).where(target, 0.0)
    lse = largest + scale.log()
    squared_lse = lse.square().where(target, 0.0)
    total = ce.sum()
    smooth = options.label_smoothing
    if smooth:
        total = (1 - smooth) * total + smooth * (lse - over_vocab / vocab).where(target, 0.0).sum()
    return _ChunkLosses(total + options.z_loss_weight * squared_lse.sum(), ce, squared_lse, lse, vocab[0])


def _gradient(logits: Tensor, labels: Tensor, options: LossOptions, found: _ChunkLosses, vocab_start: int) -> Tensor:
    """`logit_gradient` in this rank's columns, zero where the label is ignored, fp32 (n, V_local)."""
    at, owned = _columns(labels, vocab_start, logits.shape[1])
    probs = torch.exp(logits - found.lse.unsqueeze(-1))
    gradient = logit_gradient(probs, logits, found.lse, at, owned.unsqueeze(-1), found.vocab, options)
    return gradient.mul_((labels != IGNORE).unsqueeze(-1))


def _columns(labels: Tensor, vocab_start: int, width: int) -> tuple[Tensor, Tensor]:
    """Each target's column here, int64 (n, 1), 0 where it is another rank's; and whether it is here, bool (n,)."""
    at = labels - vocab_start
    owned = (at >= 0) & (at < width)
    return at.where(owned, 0).unsqueeze(-1), owned
