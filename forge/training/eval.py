"""Held-out loss: cross entropy alone, weighted by target tokens over a fixed, finite set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from attrs import frozen
from torch import Tensor, nn

from forge.errors import DataError
from forge.model.block import BlockOutput
from forge.model.moe import without_capacity
from forge.pytree import PyTree
from forge.training.extras import router_bias
from forge.training.grad import total_of
from forge.training.loss import LossFn, LossSums, check_labels
from forge.training.state import Batch
from forge.training.substitute import build_substitute

EvalStep = Callable[[dict[str, Tensor], PyTree, Batch], LossSums]


def build_eval_step(
    model: nn.Module, loss_fn: LossFn, *, vocab_size: int, compute_dtype: torch.dtype = torch.float32
) -> EvalStep:
    """`eval_step(params, extras, batch) -> LossSums` over all micro-batches; touches no state, RNG or module mode."""

    substitute = build_substitute(model)

    @torch.no_grad()
    def eval_step(params: dict[str, Tensor], extras: PyTree, batch: Batch) -> LossSums:
        check_labels(batch.labels, vocab_size)
        with substitute({name: p.to(compute_dtype) for name, p in params.items()}):
            return forward_sums(model, loss_fn, extras, batch)

    return eval_step


def forward_sums(model: nn.Module, loss_fn: LossFn, extras: PyTree, batch: Batch) -> LossSums:
    """Sums of all micro-batches under the parameters that the model holds now.

    Experts take every token, as when a text is generated: what a token costs must not depend on its neighbours in the
    batch.
    """

    def of_one(micro: Batch) -> LossSums:
        def output(hidden: Tensor, weight: Tensor, _: list[BlockOutput]) -> LossSums:
            return loss_fn(hidden, weight, micro.labels, None)

        sums: LossSums = model(micro.input_ids, micro.doc_ids, output=output, **router_bias(extras))
        return sums

    with without_capacity(model):
        return total_of([of_one(batch.micro(index)) for index in range(batch.labels.shape[0])])


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
        params: as `params_to_use` gives them.
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


@frozen
class EvalSet:
    """A fixed, finite set to evaluate on."""

    name: str  # "" = the only one
    batches: Iterable[Batch]  # the same at every iteration
    bytes_per_token: float = 0.0  # of its text; 0 = not known
    held_out: bool = True  # of the training data


def run_eval_sets(
    eval_step: EvalStep,
    params: dict[str, Tensor],
    extras: PyTree,
    sets: Iterable[EvalSet],
    *,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """`run_eval` of every set.

    Args:
        place: takes a batch to where the step computes.

    Returns:
        `eval/<name>/loss` and so on of each set, and `eval/loss` and so on over all tokens held out of the training
        data; over all sets where nothing is held out. A set without a name has the latter alone.
    """
    sets = tuple(sets)
    of_each = [
        run_eval(eval_step, params, extras, map(place, each.batches), bytes_per_token=each.bytes_per_token)
        for each in sets
    ]
    pairs = list(zip(sets, of_each, strict=True))
    metrics = _together([pair for pair in pairs if pair[0].held_out] or pairs)
    for each, found in pairs:
        if each.name:
            metrics |= {key.replace("eval/", f"eval/{each.name}/"): value for key, value in found.items()}
    return metrics


def _together(pairs: list[tuple[EvalSet, dict[str, float]]]) -> dict[str, float]:
    """The metrics of several sets as one."""
    if len(pairs) == 1:
        return dict(pairs[0][1])
    tokens = sum(found["eval/tokens"] for _, found in pairs)
    loss = sum(found["eval/loss"] * found["eval/tokens"] for _, found in pairs) / tokens
    metrics = {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": tokens}
    if all(each.bytes_per_token for each, _ in pairs):
        n_bytes = sum(found["eval/tokens"] * each.bytes_per_token for each, found in pairs)
        metrics["eval/bits_per_byte"] = loss * tokens / math.log(2) / n_bytes
    return metrics


def perplexity(loss: float) -> float:
    """exp(loss), inf where it is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
