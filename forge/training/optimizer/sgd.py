"""Stochastic gradient descent with (Nesterov) momentum (Sutskever et al. 2013) and decoupled decay."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import SGD
from forge.pytree import PyTree
from forge.training.optimizer.core import Optimizer, Params, gate, keep_unless
from forge.training.optimizer.roles import Role, decays


def sgd(config: SGD, roles: dict[str, Role]) -> Optimizer:
    """State: `momentum`, fp32 of the parameter's shape: m = momentum m + g, p -= lr m."""
    beta, decay = config.momentum, config.weight_decay
    decayed = {name for name, role in roles.items() if decays(role)}

    def init(params: Params) -> PyTree:
        return {"momentum": {name: torch.zeros_like(p, dtype=torch.float32) for name, p in params.items()}}

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        momentum, new = dict(opt_state["momentum"]), dict(params)
        for name, grad in grads.items():
            momentum[name] = beta * momentum[name] + grad
            step = grad + beta * momentum[name] if config.nesterov else momentum[name]
            kept = 1 - lr * decay if name in decayed else 1.0
            new[name] = (params[name] * kept - lr * step).to(params[name].dtype)
        return new, {"momentum": momentum}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        names = list(grads)
        if not names:
            return
        g, m, p = ([part[name] for name in names] for part in (grads, opt_state["momentum"], params))
        gate(g, scale, ok)
        lr = lr * ok
        torch._foreach_mul_(m, keep_unless(ok, beta))
        torch._foreach_add_(m, g)
        steps = torch._foreach_add(g, m, alpha=beta) if config.nesterov else m
        shrink([params[name] for name in names if name in decayed], lr * decay)
        torch._foreach_add_(p, torch._foreach_mul(steps, -lr))

    return Optimizer(init, update, update_)


def shrink(params: list[Tensor], by: Tensor) -> None:
    """In place p *= 1 - by: decoupled weight decay."""
    if params:
        torch._foreach_mul_(params, 1 - by)
