"""The seam for functional sharding: local shards as leaves, gathered block by block by functions, not by hooks.

So `torch.func` goes through a sharded model: per-sample gradients, Jacobian-vector products, derivatives of any order
that the loss has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge.distributed.functional import ShardLayout, all_reduce, gather, recomputed
from forge.errors import ConfigError
from forge.model import Transformer
from forge.pytree import PyTree
from forge.training.grad import (
    Micro,
    Objective,
    Params,
    Run,
    ValueAndGrad,
    by_backward,
    by_func,
    is_transformed,
    micro_batches,
)
from forge.training.grad_sharded import all_reduce_sums
from forge.training.loss import LossFn, LossSums, check_labels, count_targets
from forge.training.state import Batch
from forge.training.substitute import Substitute, build_substitute


def build_functional_value_and_grad(
    model: Transformer,
    loss_fn: LossFn,
    *,
    layout: ShardLayout,
    vocab_size: int,
    compute_dtype: torch.dtype = torch.float32,
    trainable: Collection[str] | None = None,
) -> ValueAndGrad:
    """Build `value_and_grad(params, extras, batch)` over shards; every rank must call it together, as often.

    `params` and the gradients are this rank's shards as plain tensors (`shard_params`), so that any optimizer that
    works element by element takes them as they are, with `build_shard_norm` as `global_norm`. Muon needs whole
    matrices: give `build_optimizer` `orthogonal_steps=sharded_orthogonal_steps(as_dtensors(params, layout), mesh)`.
    `batch` holds this rank's share of the sequences; sums and gradients are those of the global batch, the sums the
    same on every rank.

    A block is gathered when it is computed, forgotten, and gathered and computed again in the backward pass; between
    the two its input and its shards are kept. The embedding and the last norm are gathered for the forward pass, the
    head for the loss and its backward pass, which follows at once. Nothing is gathered ahead of time.

    Called under a transform of `torch.func`, it differentiates by `torch.func.grad`, otherwise by autograd on fresh
    leaves. Under a transform the graph lasts until the gradient is there, the blocks' inputs and incoming gradients
    with it, but no block's gathered parameters. `vmap` maps over what each rank passes: gradient i is that of the i-th
    samples of all ranks together.

    Args:
        model: on the meta device, or anywhere: its own parameters are not read. Neither checkpointed nor compiled.
        layout: from `shard_layout`.
        compute_dtype: dtype of gathered parameters and of the passes; gradients are summed over the ranks in fp32.
        trainable: names to differentiate; None = all.

    Raises:
        ConfigError: the model's blocks are checkpointed or compiled.
    """
    objective = _build_objective(model, loss_fn, partial(gather, layout=layout, dtype=compute_dtype))
    by_transform = {False: by_backward(objective), True: by_func(objective)}

    def value_and_grad(params: Params, extras: PyTree, batch: Batch) -> tuple[LossSums, Params]:
        transformed = is_transformed(batch)
        if not transformed:
            check_labels(batch.labels, vocab_size)
        learned = {name: p for name, p in params.items() if trainable is None or name in trainable}
        fixed = {name: p for name, p in params.items() if name not in learned}
        targets = all_reduce(count_targets(batch.labels), layout.group)
        micros = micro_batches(batch, extras, targets, layout.ranks)
        sums, grads = by_transform[transformed](learned, fixed, micros)
        return all_reduce_sums(sums, layout.group), grads

    return value_and_grad


Gather = Callable[[Params], Params]


class _Unit(NamedTuple):
    """A module whose parameters are gathered together."""

    module: nn.Module
    prefix: str  # of its parameters' names
    forward: Callable[..., Any]
    substitute: Substitute
    names: tuple[str, ...]  # of its parameters, without the prefix
    recompute: bool


def _units(model: Transformer) -> list[_Unit]:
    blocks = {f"blocks.{layer}": block for layer, block in model.blocks.items()}
    plain = {"embed": model.embed, "position_embed": model.position_embed, "norm": model.norm}
    for name, block in blocks.items():
        if "forward" in vars(block) or block._compiled_call_impl is not None or model.compiled:
            raise ConfigError(
                f"{name} is checkpointed or compiled: functional sharding recomputes blocks itself, give it the model"
                " as build_model makes it"
            )
    return [
        _Unit(module, name + ".", module.forward, build_substitute(module), names, name in blocks)
        for name, module in {**plain, **blocks}.items()
        if module is not None and (names := tuple(name for name, _ in module.named_parameters()))
    ]


def _build_objective(model: Transformer, loss_fn: LossFn, gather: Gather) -> Objective:
    run, units = Run(model), _units(model)
    head = "embed.weight" if model.head is None else "head.weight"

    def objective(params: Params, micro: Micro, then: Callable[[Tensor], None]) -> LossSums:
        def with_head(hidden: Tensor, _: Tensor, labels: Tensor, source_ids: Tensor | None) -> LossSums:
            return loss_fn(hidden, gather({head: params[head]})[head], labels, source_ids)

        with _gathering(units, gather, params):
            return run(micro, with_head, then)

    return objective


@contextmanager
def _gathering(units: list[_Unit], gather: Gather, params: Params) -> Generator[None, None, None]:
    """Let each unit compute with what is gathered of `params` at that moment."""
    try:
        for unit in units:
            shards = {name: params[unit.prefix + name] for name in unit.names}
            unit.module.forward = partial(_call, unit, gather, shards)
        yield
    finally:
        for unit in units:
            vars(unit.module).pop("forward", None)


def _call(unit: _Unit, gather: Gather, shards: Params, *args: Any, **kwargs: Any) -> Any:
    def compute(shards: Params, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wholes = gather({unit.prefix + name: shard for name, shard in shards.items()})
        with unit.substitute({name: wholes[unit.prefix + name] for name in shards}):
            return unit.forward(*args, **kwargs)

    return recomputed(compute, shards, args, kwargs) if unit.recompute else compute(shards, args, kwargs)
