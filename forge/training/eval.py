"""Held-out loss: cross entropy alone, weighted by target tokens over a fixed, finite set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forge.errors import DataError
from forge.model.block import BlockOutput
from forge.pytree import PyTree, tree_add
from forge.training.extras import router_bias
from forge.training.loss import LossFn, LossSums, check_labels
from forge.training.state import Batch

EvalStep = Callable[[dict[str, Tensor], PyTree, Batch], LossSums]


def build_eval_step(
    model: nn.Module, loss_fn: LossFn, *, vocab_size: int, compute_dtype: torch.dtype = torch.float32
) -> EvalStep:
    """`eval_step(params, extras, batch) -> LossSums` over all micro-batches; touches no state, RNG or module mode."""

    @torch.no_grad()
    def eval_step(params: dict[str, Tensor], extras: PyTree, batch: Batch) -> LossSums:
        check_labels(batch.labels, vocab_size)
        compute = {name: p.to(compute_dtype) for name, p in params.items()}
        bias = router_bias(extras)
        total: LossSums | None = None
        for index in range(batch.labels.shape[0]):
            micro = batch.micro(index)

            def output(hidden: Tensor, weight: Tensor, _: list[BlockOutput], micro: Batch = micro) -> LossSums:
                return loss_fn(hidden, weight, micro.labels, None)

            sums = functional_call(model, compute, (micro.input_ids, micro.doc_ids), {"output": output, **bias})
            total = sums if total is None else tree_add(total, sums)
        assert total is not None
        return total

    return eval_step


def run_eval(
    eval_step: EvalStep,
    params: dict[str, Tensor],
    extras: PyTree,
    batches: Iterable[Batch],
    *,
    bytes_per_token: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Evaluate a finite set: every batch once, weighted by its targets.

    Args:
        params: as `optimizer.eval_params` gives them.
        extras: the state's, for the routers' biases.
        batches: a finite iterable, the same at every call.
        bytes_per_token: bytes of text a token stands for on average; adds `eval/bits_per_byte`.
        progress: called with the number of batches done.

    Returns:
        `eval/loss` (nats a target token), `eval/perplexity` (inf where it overflows), `eval/tokens`.

    Raises:
        DataError: the set holds no target token.
    """
    sum_ce, sum_tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for done, batch in enumerate(batches, start=1):
        sums = eval_step(params, extras, batch)
        sum_ce, sum_tokens = sums.ce.double() + sum_ce, sums.tokens + sum_tokens
        if progress is not None:
            progress(done)
    tokens = int(sum_tokens)
    if tokens == 0:
        raise DataError("the evaluation set holds no target token: raise data.eval_fraction or give more text")
    loss = float(sum_ce) / tokens
    metrics = {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": float(tokens)}
    if bytes_per_token:
        metrics["eval/bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return metrics


def perplexity(loss: float) -> float:
    """exp(loss), inf where it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
