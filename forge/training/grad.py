"""Value and gradient of a global batch: the only seam that knows about devices.

    value_and_grad(params, extras, batch) -> (LossSums, grads)

The gradient is that of the summed loss over all targets of the batch, divided by their number: A micro-batches give the
gradient of the one large batch, however unevenly the targets fall.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forge.model.block import BlockOutput
from forge.pytree import PyTree, tree_add
from forge.training.loss import LossFn, LossSums, check_labels, count_targets
from forge.training.state import Batch

Params = dict[str, Tensor]
ValueAndGrad = Callable[[Params, PyTree, Batch], tuple[LossSums, Params]]


def build_value_and_grad(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    vocab_size: int,
    compute_dtype: torch.dtype = torch.float32,
    trainable: Collection[str] | None = None,
    transform: Literal["backward", "func"] = "backward",
) -> ValueAndGrad:
    """The seam for one device, on a model whose parameters are substituted by `functional_call`.

    Args:
        model: on the meta device, or anywhere: its own parameters are not read.
        loss_fn: from `build_loss_fn`.
        vocab_size: labels outside it are refused.
        compute_dtype: dtype of the forward and backward pass; gradients come and accumulate in the parameters' own.
        trainable: names to differentiate; None = all. The others get no gradient and no memory for one.
        transform: `backward` runs autograd on fresh leaves and works with activation checkpointing and compiled
            blocks; `func` uses `torch.func.grad` and so composes with `vmap` and further derivatives.
    """
    objective = _build_objective(model, loss_fn, compute_dtype)
    differentiate = {"backward": _by_backward, "func": _by_func}[transform](objective)

    def value_and_grad(params: Params, extras: PyTree, batch: Batch) -> tuple[LossSums, Params]:
        if transform == "backward":
            check_labels(batch.labels, vocab_size)
        learned = {name: p for name, p in params.items() if trainable is None or name in trainable}
        fixed = {name: p for name, p in params.items() if name not in learned}
        return differentiate(learned, fixed, batch, count_targets(batch.labels).clamp(min=1))

    return value_and_grad


Objective = Callable[[Params, Batch, Tensor, Callable[[Tensor], None]], LossSums]
Differentiate = Callable[[Params, Params, Batch, Tensor], tuple[LossSums, Params]]


class _Run(nn.Module):
    """The model and what follows it, in one call.

    Recomputation of checkpointed blocks happens in the backward pass; inside this call the substituted parameters are
    still in place then.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, loss_fn: LossFn, targets: Tensor, then: Callable[[Tensor], None]) -> LossSums:
        def output(hidden: Tensor, head_weight: Tensor, _: list[BlockOutput]) -> LossSums:
            return loss_fn(hidden, head_weight, batch.labels, batch.source_ids)

        sums = self.model(batch.input_ids, batch.doc_ids, output=output)
        then(sums.total / targets)
        return sums


def _build_objective(model: nn.Module, loss_fn: LossFn, compute_dtype: torch.dtype) -> Objective:
    run = _Run(model)

    def objective(params: Params, batch: Batch, targets: Tensor, then: Callable[[Tensor], None]) -> LossSums:
        substituted = {f"model.{name}": p.to(compute_dtype) for name, p in params.items()}
        return functional_call(run, substituted, (batch, loss_fn, targets, then))

    return objective


def _by_backward(objective: Objective) -> Differentiate:
    def differentiate(learned: Params, fixed: Params, batch: Batch, targets: Tensor) -> tuple[LossSums, Params]:
        leaves = {name: p.detach().requires_grad_() for name, p in learned.items()}
        inputs = list(leaves.values())

        def backward(loss: Tensor) -> None:
            loss.backward(inputs=inputs)

        sums: list[LossSums] = []
        for index in range(batch.labels.shape[0]):
            with torch.enable_grad():
                found = objective({**leaves, **fixed}, batch.micro(index), targets, backward)
            sums.append(_detached(found))
        grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
        return _total(sums), grads

    return differentiate


def _by_func(objective: Objective) -> Differentiate:
    def loss_of(learned: Params, fixed: Params, batch: Batch, targets: Tensor) -> tuple[Tensor, LossSums]:
        kept: list[Tensor] = []
        sums = objective({**learned, **fixed}, batch, targets, kept.append)
        return kept[0], _detached(sums)

    gradient = torch.func.grad(loss_of, has_aux=True)

    def differentiate(learned: Params, fixed: Params, batch: Batch, targets: Tensor) -> tuple[LossSums, Params]:
        parts = [gradient(learned, fixed, batch.micro(i), targets) for i in range(batch.labels.shape[0])]
        grads = parts[0][0]
        for more, _ in parts[1:]:
            grads = tree_add(grads, more)
        return _total([sums for _, sums in parts]), grads

    return differentiate


def _detached(sums: LossSums) -> LossSums:
    return LossSums(sums.total.detach(), sums.ce, sums.z, sums.aux, sums.tokens, sums.source_ce, sums.source_tokens)


def _total(parts: list[LossSums]) -> LossSums:
    total = parts[0]
    for more in parts[1:]:
        total = tree_add(total, more)
    return total


def clip_factor(grad_norm: Tensor, max_norm: float | None) -> Tensor:
    """min(1, max_norm / norm) as fp32 (), the factor that `torch.nn.utils.clip_grad_norm_` multiplies by."""
    if max_norm is None:
        return torch.ones_like(grad_norm)
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


@contextmanager
def maybe_no_sync(model: nn.Module, micro_step: int, grad_accum_steps: int) -> Generator[None, None, None]:
    """Let an FSDP2 module reduce gradients on the last micro-batch only; nothing to do for other modules.

    Args:
        micro_step: index of the micro-batch, from 0.
        grad_accum_steps: micro-batches an update.
    """
    switch = getattr(model, "set_requires_gradient_sync", None)
    if switch is None or grad_accum_steps == 1:
        yield
        return
    switch(micro_step == grad_accum_steps - 1)
    try:
        yield
    finally:
        switch(True)
