"""The seam for sharded models (FSDP2, HSDP): the module computes with its own parameters, which the state's leaves are.

FSDP2's hooks ignore parameters that `functional_call` substitutes and compute with the module's own, silently wrong. So
each leaf of `params` must share the module's storage; where one does not, it is copied in.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from forge.distributed.context_parallel import shard_sequence
from forge.distributed.fsdp import fsdp_modules
from forge.distributed.functional import all_reduce
from forge.distributed.mesh import Mesh
from forge.distributed.shards import local_data
from forge.errors import ConfigError
from forge.model import Transformer
from forge.pytree import PyTree
from forge.training.eval import EvalStep, forward_sums
from forge.training.grad import (
    Micro,
    Params,
    Run,
    ValueAndGrad,
    detached,
    is_transformed,
    maybe_no_sync,
    micro_batches,
    total_of,
)
from forge.training.loss import LossFn, LossSums, check_labels, count_targets
from forge.training.state import Batch


def build_sharded_value_and_grad(
    model: Transformer,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    vocab_size: int,
    trainable: Collection[str] | None = None,
) -> ValueAndGrad:
    """Build `value_and_grad(params, extras, batch)` over a parallelized model; every rank must call it together.

    Sums and gradients are those of the global batch, and the sums are the same on every rank.

    Args:
        model: after `parallelize` and `materialize`.
        mesh: of the process; `batch` holds this rank's share of the sequences.
        trainable: names to differentiate; None = all.
    """
    run = Run(model)
    own: Params = dict(model.named_parameters())

    def value_and_grad(params: Params, extras: PyTree, batch: Batch) -> tuple[LossSums, Params]:
        refuse_transforms(batch)
        check_labels(batch.labels, vocab_size)
        bind(own, params, trainable)
        micros = shared_micro_batches(batch, extras, mesh)
        sums: list[LossSums] = []
        for index, micro in enumerate(micros):
            with maybe_no_sync(model, index, len(micros)), torch.enable_grad():
                sums.append(detached(run(micro, loss_fn, lambda loss: loss.backward())))
        return all_reduce_sums(total_of(sums), mesh.loss.get_group()), take_gradients(own)

    return value_and_grad


def build_sharded_eval_step(model: Transformer, loss_fn: LossFn, *, mesh: Mesh, vocab_size: int) -> EvalStep:
    """`eval_step(params, extras, batch)` over a parallelized model; every rank calls it with its share of the batch.

    Parameters other than the module's own (an average) are lent to it for the call.
    """
    own: Params = dict(model.named_parameters())

    @torch.no_grad()
    def eval_step(params: Params, extras: PyTree, batch: Batch) -> LossSums:
        check_labels(batch.labels, vocab_size)
        with lent(model, own, params):
            sums = forward_sums(model, loss_fn, extras, shard_sequence(batch, mesh.rank("cp"), mesh.size("cp")))
        return all_reduce_sums(sums, mesh.loss.get_group())

    return eval_step


def shared_micro_batches(batch: Batch, extras: PyTree, mesh: Mesh) -> list[Micro]:
    """This rank's micro-batches, cut over cp, their targets counted over the global batch."""
    batch = shard_sequence(batch, mesh.rank("cp"), mesh.size("cp"))
    targets = count_targets(batch.labels)
    dist.all_reduce(targets, group=mesh.loss.get_group())
    return micro_batches(batch, extras, targets, mesh.data_ranks * mesh.size("cp"))


@contextmanager
def lent(module: nn.Module, own: Params, params: Params) -> Generator[None, None, None]:
    """Let a module compute forward passes with `params`, and have its own parameters back afterwards."""
    before = {name: local_data(p).clone() for name, p in own.items() if not shares(p, params[name])}
    bind(own, params, None)
    try:
        yield
    finally:
        for sharded in fsdp_modules(module):
            sharded.reshard()  # what was gathered is kept until a backward pass, which does not come
        for name, part in before.items():
            local_data(own[name]).copy_(part)


def shares(parameter: Tensor, given: Tensor) -> bool:
    """Whether the part here of the one tensor is the storage of the other's."""
    return local_data(parameter).data_ptr() == local_data(given).data_ptr()


def bind(own: Params, params: Params, trainable: Collection[str] | None) -> None:
    """Make the module compute with `params`: shared storage is left, anything else copied in."""
    for name, parameter in own.items():
        if not shares(parameter, params[name]):
            local_data(parameter).copy_(local_data(params[name]))
        parameter.requires_grad_(trainable is None or name in trainable)


def take_gradients(own: Params) -> Params:
    """Take the gradients off the module; nothing is left behind. Zeros where no token reached a parameter."""
    grads = {}
    for name, parameter in own.items():
        if parameter.requires_grad:
            grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
    return grads


def all_reduce_sums(sums: LossSums, group: dist.ProcessGroup) -> LossSums:
    """Sums over the ranks of a group, in one message; fp64 holds counts up to 2^53 exactly."""
    leaves, structure = torch_pytree.tree_flatten(sums)
    message = all_reduce(torch.cat([leaf.double().flatten() for leaf in leaves]), group)
    parts = message.split([leaf.numel() for leaf in leaves])
    reduced = [part.view_as(leaf).to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return torch_pytree.tree_unflatten(reduced, structure)


def refuse_transforms(batch: Batch) -> None:
    """FSDP2's hooks cannot be transformed: say so before they compute something else.

    Raises:
        ConfigError: called under `torch.func`'s grad, vmap or jvp.
    """
    if is_transformed(batch):
        raise ConfigError(
            "torch.func transforms do not go through FSDP2's hooks: build the seam with build_functional_value_and_grad"
            " (forge.training.grad_functional), or on one process with build_value_and_grad"
        )
