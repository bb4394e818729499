"""Value and gradient of a global batch: the seam behind which devices and ranks are.

    value_and_grad(params, extras, batch) -> (LossSums, grads)

The gradient is that of the summed loss over all targets of the batch, divided by their number: A micro-batches give the
gradient of the one large batch, however unevenly the targets fall.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from attrs import evolve
from torch import Tensor, nn

from forge.model.block import BlockOutput
from forge.pytree import PyTree, tree_add, tree_map, wide, widened
from forge.training.extras import router_bias
from forge.training.graphs import FixedPlaces
from forge.training.loss import LossFn, LossSums, check_labels, count_targets
from forge.training.state import Batch
from forge.training.substitute import build_substitute

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
    cuda_graphs: bool = False,
) -> ValueAndGrad:
    """The seam for one device, on a model whose parameters are substituted by `functional_call`.

    Args:
        model: on the meta device, or anywhere: its own parameters are not read.
        loss_fn: from `build_loss_fn`.
        vocab_size: labels outside it are refused.
        compute_dtype: dtype of the forward and backward pass; gradients come in the parameters' own, and
            accumulate in fp32 at least.
        trainable: names to differentiate; None = all. The others get no gradient and no memory for one.
        transform: `backward` runs autograd on fresh leaves and works with activation checkpointing and compiled
            blocks; `func` uses `torch.func.grad` and so composes with `vmap` and further derivatives.
        cuda_graphs: the model's blocks are compiled to be replayed (`train.cuda_graphs`): copy what a replay would
            write over. By `backward`, and for a step that donates: parameters that move are recorded anew each time.
            The gradients are good until the next call.
    """
    objective = _build_objective(model, loss_fn, compute_dtype)
    places = FixedPlaces(compute_dtype) if cuda_graphs else None
    differentiate = {"backward": by_backward(objective, places), "func": by_func(objective)}[transform]

    def value_and_grad(params: Params, extras: PyTree, batch: Batch) -> tuple[LossSums, Params]:
        if not is_transformed(batch):
            check_labels(batch.labels, vocab_size)
        learned = {name: p for name, p in params.items() if trainable is None or name in trainable}
        fixed = {name: p for name, p in params.items() if name not in learned}
        return differentiate(learned, fixed, micro_batches(batch, extras, count_targets(batch.labels)))

    return value_and_grad


class Micro(NamedTuple):
    """One micro-batch and what its share of the objective depends on."""

    batch: Batch  # (B, S) each
    router_bias: dict[str, dict[str, Tensor]]  # keyword arguments of the model
    targets: Tensor  # int64 (): of the global batch
    share: float  # of the global batch's micro-batches


Objective = Callable[[Params, Micro, Callable[[Tensor], None]], LossSums]
Differentiate = Callable[[Params, Params, list[Micro]], tuple[LossSums, Params]]
"""(params to differentiate, the others, micro-batches) -> sums and gradients, added up."""


class Run(nn.Module):
    """The model and what follows it, in one call.

    Recomputation of checkpointed blocks happens in the backward pass; inside this call the substituted parameters are
    still in place then.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro: Micro, loss_fn: LossFn, then: Callable[[Tensor], None]) -> LossSums:
        batch = micro.batch

        def output(hidden: Tensor, head_weight: Tensor, blocks: list[BlockOutput]) -> tuple[Tensor, LossSums]:
            sums = loss_fn(hidden, head_weight, batch.labels, batch.source_ids)
            sums = _with_routers(sums, blocks, micro.targets * micro.share)
            return sums.total, sums  # FSDP2 sees what a backward pass will begin with in tuples, not in our classes

        _, sums = self.model(batch.input_ids, batch.doc_ids, output=output, **micro.router_bias)
        then(sums.total / micro.targets.clamp(min=1))
        return sums


def _with_routers(sums: LossSums, blocks: list[BlockOutput], weight: Tensor) -> LossSums:
    """Add the routers' losses, a mean over tokens each, as a sum over this micro-batch's share of the targets."""
    routers = {str(index): block.router for index, block in enumerate(blocks) if block.router is not None}
    if not routers:
        return sums
    aux = weight * torch.stack([router.loss for router in routers.values()]).sum()
    return evolve(
        sums,
        total=sums.total + aux,
        aux=aux.detach(),
        router_counts={index: router.counts for index, router in routers.items()},
        router_entropy=torch.stack([router.entropy for router in routers.values()]).sum(),
        router_dropped=torch.stack([router.dropped for router in routers.values()]).sum(),
    )


def _build_objective(model: nn.Module, loss_fn: LossFn, compute_dtype: torch.dtype) -> Objective:
    run, substitute = Run(model), build_substitute(model)

    def objective(params: Params, micro: Micro, then: Callable[[Tensor], None]) -> LossSums:
        with substitute({name: p if p.dtype == compute_dtype else p.to(compute_dtype) for name, p in params.items()}):
            return run(micro, loss_fn, then)

    return objective


def micro_batches(batch: Batch, extras: PyTree, targets: Tensor, ranks: int = 1) -> list[Micro]:
    """The micro-batches of this rank's batch, of which `ranks` ranks have as many each, or parts of as many."""
    count = batch.labels.shape[0]
    return [Micro(batch.micro(index), router_bias(extras), targets, 1 / (count * ranks)) for index in range(count)]


def by_backward(objective: Objective, places: FixedPlaces | None = None) -> Differentiate:
    """By autograd on fresh leaves, one backward pass a micro-batch; with `places` of blocks replayed as CUDA graphs."""

    def differentiate(learned: Params, fixed: Params, micros: list[Micro]) -> tuple[LossSums, Params]:
        computed, fixed = (learned, fixed) if places is None else (places(learned), places(fixed))
        leaves = {name: p.detach().requires_grad_() for name, p in computed.items()}
        inputs = list(leaves.values())
        several = len(micros) > 1
        moved = {name: leaf for name, leaf in leaves.items() if several and (places or wide(leaf) != leaf.dtype)}
        totals: Params = {}

        def backward(loss: Tensor) -> None:
            loss.backward(inputs=inputs)

        sums: list[LossSums] = []
        for micro in micros:
            if places is not None:
                torch.compiler.cudagraph_mark_step_begin()  # what the last one left is done with
            with torch.enable_grad():
                found = detached(objective({**leaves, **fixed}, micro, backward))
            sums.append(found if places is None else tree_map(torch.clone, found))
            _move_gradients(moved, totals)
        found_grads = {name: leaf.grad for name, leaf in leaves.items()} | totals
        grads = {
            name: torch.zeros_like(p) if (grad := found_grads[name]) is None else grad.to(p.dtype)
            for name, p in learned.items()
        }
        return total_of(sums), grads

    return differentiate


def _move_gradients(leaves: Params, totals: Params) -> None:
    """Add the leaves' gradients to totals of their own and take them off.

    The totals are wide, since bf16 sums lose what is small beside them, and copies, since a CUDA graph's next replay
    writes over what the last returned.
    """
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            before = totals.get(name)
            totals[name] = leaf.grad.to(wide(leaf), copy=True) if before is None else before.add_(leaf.grad)
            leaf.grad = None


def by_func(objective: Objective) -> Differentiate:
    """By `torch.func.grad`."""

    def loss_of(learned: Params, fixed: Params, micro: Micro) -> tuple[Tensor, LossSums]:
        kept: list[Tensor] = []
        sums = objective({**learned, **fixed}, micro, kept.append)
        return kept[0], sums

    gradient = torch.func.grad(loss_of, has_aux=True)

    def differentiate(learned: Params, fixed: Params, micros: list[Micro]) -> tuple[LossSums, Params]:
        parts = [gradient(learned, fixed, micro) for micro in micros]
        grads = parts[0][0]
        if len(parts) > 1:
            grads = {name: widened(grad) for name, grad in grads.items()}
            for more, _ in parts[1:]:
                grads = tree_add(grads, more)
            grads = {name: grad.to(learned[name].dtype) for name, grad in grads.items()}
        return total_of([sums for _, sums in parts]), grads

    return differentiate


def detached(sums: LossSums) -> LossSums:
    """The sums without the graph."""
    return evolve(sums, total=sums.total.detach())


def total_of(parts: list[LossSums]) -> LossSums:
    """The sums over all micro-batches."""
    total = parts[0]
    for more in parts[1:]:
        total = tree_add(total, more)
    return total


def clip_factor(grad_norm: Tensor, max_norm: float | None) -> Tensor:
    """min(1, max_norm / norm) as fp32 (), the factor that `torch.nn.utils.clip_grad_norm_` multiplies by."""
    if max_norm is None:
        return torch.ones_like(grad_norm)
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)


def is_transformed(batch: Batch) -> bool:
    """Whether this is a call under a transform of `torch.func`."""
    functorch = torch._C._functorch
    return functorch.maybe_current_level() is not None or functorch.is_functorch_wrapped_tensor(batch.labels)


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
