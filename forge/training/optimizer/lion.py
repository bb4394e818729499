"""Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import Lion
from forge.pytree import PyTree
from forge.training.optimizer.core import Optimizer, Params, gated, keep_unless, shrink, zeros
from forge.training.optimizer.roles import Role, decayed_names


def lion(config: Lion, roles: dict[str, Role]) -> Optimizer:
    """State: `momentum`, fp32 of the parameter's shape.

    p -= lr (sign(beta1 m + (1 - beta1) g) + wd p), then m = beta2 m + (1 - beta2) g.
    """
    beta1, beta2, decay, decayed = config.beta1, config.beta2, config.weight_decay, decayed_names(roles)

    def init(params: Params) -> PyTree:
        return {"momentum": zeros(params)}

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        momentum, new = dict(opt_state["momentum"]), dict(params)
        for name, grad in grads.items():
            g = grad.to(momentum[name].dtype)
            sign = torch.sign(beta1 * momentum[name] + (1 - beta1) * g)
            kept = 1 - lr * decay if name in decayed else 1.0
            new[name] = (params[name] * kept - lr * sign).to(params[name].dtype)
            momentum[name] = beta2 * momentum[name] + (1 - beta2) * g
        return new, {"momentum": momentum}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        names = list(grads)
        if not names:
            return
        g = gated(list(grads.values()), scale, ok)
        m, p = ([part[name] for name in names] for part in (opt_state["momentum"], params))
        lr = lr * ok
        steps = torch._foreach_mul(m, beta1)
        torch._foreach_add_(steps, g, alpha=1 - beta1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(steps, lr)
        shrink([params[name] for name in names if name in decayed], lr * decay)
        torch._foreach_sub_(p, steps)
        torch._foreach_mul_(m, keep_unless(ok, beta2))
        torch._foreach_add_(m, g, alpha=1 - beta2)

    return Optimizer(init, update, update_)
