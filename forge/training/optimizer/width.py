"""muP's learning rates: the rule by role and optimizer, and an optimizer that follows it."""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import evolve
from torch import Tensor

from forge.config import SGD, Muon, OptimizerConfig
from forge.pytree import PyTree
from forge.training.optimizer.core import Optimizer, Params
from forge.training.optimizer.roles import Role


def lr_factor(config: OptimizerConfig, name: str, role: Role, width: float) -> float:
    """What muP multiplies a parameter's learning rate by in a model `width` times as wide as the one that was tuned.

    AdamW, schedule-free AdamW and Lion, whose updates have a size of their own: 1 / width for hidden matrices and
    routers, 1 for the rest. SGD: width for what only one side of grows (embeddings, the head, norms, biases), 1 for
    hidden matrices, 1 / width for routers, which have no multiplier of their output (Yang et al. 2022, tables 3 and 8).

    Muon's orthogonal updates have the right size at any width with `scaling = "spectral"` (Yang, Simon & Bernstein
    2023, "A spectral condition for feature learning"); with "rms" they grow with its root. The rest is AdamW's.
    """
    if role == "router":
        return 1 / width
    if isinstance(config, Muon):
        return 1 / math.sqrt(width) if role == "hidden" and config.scaling == "rms" else 1.0
    if isinstance(config, SGD):
        fixed = name.removesuffix(".weight").endswith((".q_norm", ".k_norm"))  # as wide as a head
        return 1.0 if role == "hidden" or fixed else width
    return 1 / width if role == "hidden" else 1.0


def scaled_by_width(
    build: Callable[[OptimizerConfig], Optimizer], config: OptimizerConfig, roles: dict[str, Role], width: float
) -> Optimizer:
    """The optimizer that `build` makes, with each parameter's learning rate times its `lr_factor`.

    Weight decay is divided by the same factor: its product with the learning rate stays (as in `mup.MuAdamW`). The
    factor follows from the name, so it is the same for every part of a sharded parameter.
    """
    factors = {name: lr_factor(config, name, role, width) for name, role in roles.items()}
    optimizers = {f: build(evolve(config, weight_decay=config.weight_decay / f)) for f in factors.values()}
    any_of_them = next(iter(optimizers.values()))  # what does not depend on learning rate and decay

    def groups(grads: Params) -> list[tuple[float, Params]]:
        parts = [(f, {name: g for name, g in grads.items() if factors[name] == f}) for f in optimizers]
        return [(f, part) for f, part in parts if part]

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        for factor, part in groups(grads):
            params, opt_state = optimizers[factor].update(part, opt_state, params, lr * factor)
        return params, opt_state

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        for factor, part in groups(grads):
            in_place = optimizers[factor].update_
            assert in_place is not None, "every optimizer of ours has one"
            in_place(part, opt_state, params, lr * factor, scale, ok)

    return Optimizer(any_of_them.init, update, update_, any_of_them.eval_params)
