"""What an optimizer is: pure functions over dicts by parameter name, and a donated fast path beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from forge.distributed.shards import as_sharded, is_sharded, local_data, tree_local, tree_sharded
from forge.pytree import PyTree, tree_where, wide, widened

Params = dict[str, Tensor]
Init = Callable[[Params], PyTree]
Update = Callable[[Params, PyTree, Params, Tensor], tuple[Params, PyTree]]
UpdateInPlace = Callable[[Params, PyTree, Params, Tensor, Tensor, Tensor], None]
EvalParams = Callable[[Params, PyTree], Params]


def _as_they_are(params: Params, opt_state: PyTree) -> Params:
    return params


class Optimizer(NamedTuple):
    """An optimizer; a user's own needs `init` and `update` only.

    `opt_state` is a dict of dicts by parameter name, so that entries can be added for a layer that is unfrozen late.
    Parameters without a gradient are frozen: no function touches them.
    """

    init: Init
    """(params to train) -> opt_state."""
    update: Update
    """(grads, opt_state, params, lr fp32 ()) -> (params, opt_state); out of place, works under `torch.func`."""
    update_: UpdateInPlace | None = None
    """(grads, opt_state, params, lr, scale, ok): the same in place, on gradients times `scale`; may overwrite the
    gradients. Where `ok` is false no value in params and opt_state changes; decided on the device. Parameters below
    fp32 take it through `with_master_weights`."""
    eval_params: EvalParams = _as_they_are
    """(params, opt_state) -> the optimizer's own average, schedule-free's; else the parameters. See `params_to_use`."""


def apply_update(
    optimizer: Optimizer,
    grads: Params,
    opt_state: PyTree,
    params: Params,
    *,
    lr: Tensor,
    scale: Tensor,
    ok: Tensor,
    donate: bool,
) -> tuple[Params, PyTree]:
    """One update with gradients times `scale`, or none where `ok` is false.

    Args:
        lr: fp32 ().
        scale: fp32 (), from clipping.
        ok: bool (): the gradients are finite and there was a target.
        donate: params, opt_state and grads may be overwritten.

    Of sharded parameters each rank updates its own parts: no optimizer sees a DTensor.
    """
    update_ = optimizer.update_ if donate else None
    if is_sharded(params):
        new = apply_update(
            optimizer, tree_local(grads), tree_local(opt_state), tree_local(params),
            lr=lr, scale=scale, ok=ok, donate=donate,
        )  # fmt: skip
        if update_ is not None:  # the parts were changed where they are
            return params, opt_state
        return tree_sharded(new[0], params), tree_sharded(new[1], opt_state)
    if update_ is not None:
        with torch.no_grad():
            update_(grads, opt_state, params, lr, scale, ok)
        return params, opt_state
    clean = {name: torch.where(ok, widened(grad) * scale, 0.0) for name, grad in grads.items()}
    new_params, new_state = optimizer.update(clean, opt_state, params, lr)
    return tree_where(ok, new_params, params), tree_where(ok, new_state, opt_state)


def init_opt_state(optimizer: Optimizer, params: Params) -> PyTree:
    """`optimizer.init`; what has the shape of a sharded parameter's part is sharded like the parameter."""
    if not is_sharded(params):
        return optimizer.init(params)
    state = optimizer.init(tree_local(params))

    def placed(name: str, leaf: Tensor) -> Tensor:
        return as_sharded(leaf, params[name]) if leaf.shape == local_data(params[name]).shape else leaf

    return {key: {name: placed(name, leaf) for name, leaf in part.items()} for key, part in state.items()}


def eval_params(optimizer: Optimizer, params: Params, opt_state: PyTree) -> Params:
    """`optimizer.eval_params`, on each rank's parts where the parameters are sharded."""
    if not is_sharded(params):
        return optimizer.eval_params(params, opt_state)
    return tree_sharded(optimizer.eval_params(tree_local(params), tree_local(opt_state)), params)


def extend(optimizer: Optimizer, opt_state: PyTree, params: Params) -> PyTree:
    """Give the parameters that have no entry yet a fresh one: their optimizer state starts now."""
    known = {name for part in opt_state.values() for name in part}
    fresh = init_opt_state(optimizer, {name: p for name, p in params.items() if name not in known})
    return {key: {**part, **fresh[key]} for key, part in opt_state.items()}


def zeros(params: Params) -> Params:
    """A moment for each parameter, of its shape and in its wide dtype."""
    return {name: torch.zeros_like(p, dtype=wide(p)) for name, p in params.items()}


def scalar_zeros(params: Params) -> Params:
    """A number for each parameter, fp32 ()."""
    return {name: torch.zeros((), dtype=torch.float32, device=p.device) for name, p in params.items()}


def bias_correction(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count for count >= 1, without cancellation: in fp32, 1 - 0.999^1 is wrong in the fifth digit."""
    return -torch.expm1(count * (math.log(beta) if beta else -math.inf))


def root(moment: Tensor) -> Tensor:
    """The square root, with gradient 0 where the moment is 0: who differentiates an update must not divide by it."""
    positive = moment > 0
    return torch.where(positive, torch.where(positive, moment, 1.0).sqrt(), 0.0)


def gated(grads: list[Tensor], scale: Tensor, ok: Tensor) -> list[Tensor]:
    """Gradients times `scale`, and zero where `ok` is false, whatever they held; in place where they are wide."""
    grads = [widened(grad) for grad in grads]
    torch._foreach_mul_(grads, scale)
    for grad in grads:
        grad.masked_fill_(~ok, 0.0)
    return grads


def keep_unless(ok: Tensor, beta: float) -> Tensor:
    """beta, or 1 where `ok` is false: m * 1 + 0 leaves a buffer as it is; fp32 ()."""
    return torch.where(ok, beta, 1.0).to(torch.float32)


def shrink(params: list[Tensor], by: Tensor) -> None:
    """In place p *= 1 - by: decoupled weight decay."""
    if params:
        torch._foreach_mul_(params, 1 - by)
