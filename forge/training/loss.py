"""The objective: cross entropy summed over target tokens, with z-loss and label smoothing by choice.

Losses come as sums, never as means, so that micro-batches and ranks add up; whoever knows the global number of
targets divides once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from forge.config import ModelConfig, TrainConfig
from forge.data.batch import IGNORE
from forge.distributed.shards import local_part, local_slices
from forge.errors import DataError
from forge.metrics.timeline import LOSS, span
from forge.model.head import head_logits
from forge.pytree import register_node
from forge.training.fused_loss import LossOptions, TokenLosses, fused_losses, token_losses
from forge.training.vocab_loss import vocab_parallel_losses


@register_node
@frozen
class LossSums:
    """Sums over target tokens; additive over micro-batches and ranks."""

    total: Tensor  # fp32 (): the objective, differentiable
    ce: Tensor  # fp32 (): cross entropy without smoothing
    z: Tensor  # fp32 (): z-loss, weighted
    aux: Tensor  # fp32 (): auxiliary losses of the routers, weighted
    tokens: Tensor  # int64 (): targets
    source_ce: Tensor | None = None  # fp32 (sources,)
    source_tokens: Tensor | None = None  # int64 (sources,)
    router_counts: dict[str, Tensor] | None = None  # by block index: int64 (E,), assignments to each expert
    router_entropy: Tensor | None = None  # fp32 (): over tokens and layers, nats
    router_dropped: Tensor | None = None  # int64 (): assignments beyond capacity


Losses = Callable[[Tensor, Tensor, Tensor, LossOptions, int], TokenLosses]
"""(hidden (N, dim), head weight (V, dim), labels int64 (N,), options, chunk) -> losses of the positions."""

LossFn = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], LossSums]
"""(hidden (B, S, dim), head weight (V, dim), labels int64 (B, S), source_ids int64 (B,) | None) -> sums."""


def build_loss_fn(
    train: TrainConfig, model: ModelConfig, sources: int = 0, vocab_group: dist.ProcessGroup | None = None
) -> LossFn:
    """The loss that `train.loss`, `train.z_loss_weight` and `train.label_smoothing` name.

    The three implementations agree in value and gradient. `fused` is fastest and smallest; `chunked` recomputes each
    chunk of logits in the backward pass; `plain` holds all logits and can be differentiated any number of times.

    Args:
        sources: number of data sources to keep apart in `source_ce` and `source_tokens`; 0 = none.
        vocab_group: ranks over which the head's rows are cut, as a DTensor; they compute the fused loss together.
    """
    options = LossOptions(train.z_loss_weight, train.label_smoothing, model.logit_softcap)
    losses: Losses = {"fused": fused_losses, "chunked": _chunked, "plain": _plain}[train.loss]
    if vocab_group is not None:
        losses = partial(_vocab_parallel, vocab_group)
    return _build(losses, options, train.loss_chunk_size, sources)


def build_eval_loss_fn(train: TrainConfig, model: ModelConfig, vocab_group: dist.ProcessGroup | None = None) -> LossFn:
    """Cross entropy alone: no z-loss, no smoothing. For evaluation."""
    losses: Losses = fused_losses if vocab_group is None else partial(_vocab_parallel, vocab_group)
    return _build(losses, LossOptions(logit_softcap=model.logit_softcap), train.loss_chunk_size, sources=0)


def _vocab_parallel(
    group: dist.ProcessGroup, hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, chunk: int
) -> TokenLosses:
    assert isinstance(weight, DTensor)
    start = local_slices(weight)[0].start
    return vocab_parallel_losses(hidden, local_part(weight), labels, options, chunk, group, start)


def chunk_size(asked: int | None, device: str) -> int:
    """`train.loss_chunk_size` on a type of device.

    Each chunk reads and writes the head's fp32 gradient, 8 bytes an element, and spends 6 FLOPs a token on it: with
    1024 tokens that is a fifth to a third of the products' time, at the 150 to 250 FLOPs a byte of an A100 or H100.
    """
    return asked or (256 if device == "cpu" else 1024)


def _build(losses: Losses, options: LossOptions, chunk: int | None, sources: int) -> LossFn:
    def loss_fn(hidden: Tensor, weight: Tensor, labels: Tensor, source_ids: Tensor | None = None) -> LossSums:
        with span(LOSS):
            return sums(hidden, weight, labels, source_ids)

    def sums(hidden: Tensor, weight: Tensor, labels: Tensor, source_ids: Tensor | None) -> LossSums:
        rows = chunk_size(chunk, hidden.device.type)
        found = losses(hidden.flatten(0, -2), weight, labels.flatten(), options, rows)
        by_source = _by_source(found.ce.view_as(labels), labels, source_ids, sources) if sources else (None, None)
        zero = found.ce.new_zeros(())
        return LossSums(
            total=found.total,
            ce=found.ce.sum(),
            z=options.z_loss_weight * found.squared_lse.sum() if options.z_loss_weight else zero,
            aux=zero,
            tokens=count_targets(labels),
            source_ce=by_source[0],
            source_tokens=by_source[1],
        )

    return loss_fn


def _by_source(ce: Tensor, labels: Tensor, source_ids: Tensor | None, sources: int) -> tuple[Tensor, Tensor]:
    """Sums of ce (B, S) and counts of targets by source, (sources,) each; without ids all belongs to source 0."""
    ids = torch.zeros_like(labels[:, 0]) if source_ids is None else source_ids
    tokens = (labels != IGNORE).sum(dim=-1)
    return (
        ce.new_zeros(sources).index_add(0, ids, ce.sum(dim=-1)),
        tokens.new_zeros(sources).index_add(0, ids, tokens),
    )


def cross_entropy(logits: Tensor, labels: Tensor, z_loss_weight: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """Mean over the targets of logits (..., V) and int64 labels (...), fp32 (); 0 where every label is ignored.

    The plain form, for those who have logits in hand.
    """
    options = LossOptions(z_loss_weight, label_smoothing)
    found = token_losses(logits.float().flatten(0, -2), labels.flatten(), options)
    return found.total / count_targets(labels).clamp(min=1)


def count_targets(labels: Tensor) -> Tensor:
    """Labels that are not ignored, int64 ()."""
    return (labels != IGNORE).sum()


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Refuse labels outside the vocabulary before a kernel can fault on them.

    On the CPU the id is named at once; on a device the check is asynchronous and costs no synchronisation.

    Raises:
        DataError: a label >= vocab_size, or negative and not IGNORE.
    """
    wrong = (labels != labels.clamp(0, vocab_size - 1)) & (labels != IGNORE)
    if labels.is_cuda:
        torch._assert_async(~wrong.any(), f"a label lies outside the vocabulary of {vocab_size}")
        return
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise DataError(
            f"label {labels[where].item()} at position {where} is outside the vocabulary of {vocab_size};"
            f" positions to ignore carry {IGNORE}"
        )


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, chunk: int) -> TokenLosses:
    return token_losses(head_logits(hidden, weight, options.logit_softcap), labels, options)


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, chunk: int) -> TokenLosses:
    parts = [
        checkpoint(_plain, h, weight, y, options, chunk, use_reentrant=False)
        for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True)
    ]
    total, ce, squared_lse = zip(*parts, strict=True)
    return TokenLosses(torch.stack(total).sum(), torch.cat(ce), torch.cat(squared_lse))
