"""Stochastic gradient descent with (Nesterov) momentum (Sutskever et al. 2013) and decoupled decay."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import SGD
from forge.pytree import PyTree
from forge.training.optimizer.core import Optimizer, Params, gated, keep_unless, shrink, zeros
from forge.training.optimizer.roles import Role, decayed_names


def sgd(config: SGD, roles: dict[str, Role]) -> Optimizer:
    """State: `momentum`, fp32 of the parameter's shape: m = momentum m + g, p -= lr (m or g + momentum m, and wd p)."""
    beta, decay, decayed = config.momentum, config.weight_decay, decayed_names(roles)

    def init(params: Params) -> PyTree:
        return {"momentum": zeros(params)}

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
        g = gated(list(grads.values()), scale, ok)
        m, p = ([part[name] for name in names] for part in (opt_state["momentum"], params))
        lr = lr * ok
        torch._foreach_mul_(m, keep_unless(ok, beta))
        torch._foreach_add_(m, g)
        steps = torch._foreach_add(g, m, alpha=beta) if config.nesterov else m
        shrink([params[name] for name in names if name in decayed], lr * decay)
        torch._foreach_sub_(p, torch._foreach_mul(steps, lr))

    return Optimizer(init, update, update_)
