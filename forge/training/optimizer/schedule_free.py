"""Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled", algorithm 1).

The parameters are y, where the gradient is taken; the state holds z, the iterate of the base optimizer. The average x,
which evaluation and export use, is recovered: y = (1 - beta1) z + beta1 x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import ScheduleFree
from forge.pytree import PyTree
from forge.training.optimizer.core import Optimizer, Params, gate, keep_unless
from forge.training.optimizer.roles import Role, decays


def schedule_free(config: ScheduleFree, roles: dict[str, Role]) -> Optimizer:
    """State: `z` and `nu`, fp32 of the parameter's shape; `count`, `weight_sum` and `lr_max`, fp32 ().

    With k updates made: lr_k = lr min(1, (k + 1) / warmup); nu = beta2 nu + (1 - beta2) g^2;
    d = g / (sqrt(nu / (1 - beta2^(k+1))) + eps) + wd y; z -= lr_k d; c = w / sum of w with w = (k + 1)^r lr_max^p;
    x = (1 - c) x + c z; y = (1 - beta1) z + beta1 x.
    """
    beta1, beta2, decay = config.beta1, config.beta2, config.weight_decay
    decayed = {name for name, role in roles.items() if decays(role)}

    def init(params: Params) -> PyTree:
        scalar = {name: torch.zeros((), dtype=torch.float32, device=p.device) for name, p in params.items()}
        return {
            "z": {name: p.to(torch.float32, copy=True) for name, p in params.items()},
            "nu": {name: torch.zeros_like(p, dtype=torch.float32) for name, p in params.items()},
            "count": scalar,
            "weight_sum": {name: torch.zeros_like(s) for name, s in scalar.items()},
            "lr_max": {name: torch.zeros_like(s) for name, s in scalar.items()},
        }

    def advance(count: Tensor, weight_sum: Tensor, lr_max: Tensor, lr: Tensor) -> tuple[Tensor, ...]:
        """The scalars after an update: count, weight sum, largest lr; and this update's lr and averaging weight c."""
        count = count + 1
        if config.warmup_steps:
            lr = lr * (count / config.warmup_steps).clamp(max=1.0)
        lr_max = torch.maximum(lr_max, lr)
        weight = count**config.r * lr_max**config.weight_lr_power
        weight_sum = weight_sum + weight
        share = torch.where(weight_sum > 0, weight / torch.where(weight_sum > 0, weight_sum, 1.0), 0.0)
        return count, weight_sum, lr_max, lr, share

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        new, state = dict(params), {key: dict(part) for key, part in opt_state.items()}
        for name, grad in grads.items():
            y, z, nu = params[name], state["z"][name], state["nu"][name]
            count, weight_sum, lr_max, step_lr, share = advance(
                state["count"][name], state["weight_sum"][name], state["lr_max"][name], lr
            )
            nu = beta2 * nu + (1 - beta2) * grad * grad
            step = grad / ((nu / (1 - beta2**count)).sqrt() + config.eps)
            if name in decayed:
                step = step + decay * y
            x = (y - (1 - beta1) * z) / beta1
            z = z - step_lr * step
            x = (1 - share) * x + share * z
            new[name] = ((1 - beta1) * z + beta1 * x).to(y.dtype)
            for key, value in zip(state, (z, nu, count, weight_sum, lr_max), strict=True):
                state[key][name] = value
        return new, state

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        names = list(grads)
        if not names:
            return
        gate([grads[name] for name in names], scale, ok)
        y, z, nu, g = ([part[name] for name in names] for part in (params, opt_state["z"], opt_state["nu"], grads))
        torch._foreach_mul_(nu, keep_unless(ok, beta2))
        torch._foreach_add_(nu, torch._foreach_mul(g, g), alpha=1 - beta2)
        # y' = y + c (z - y) - lr (1 - beta1 (1 - c)) d with the old z, and z' = z - lr d: no x is ever stored.
        scalars = [advance(*(opt_state[key][name] for key in ("count", "weight_sum", "lr_max")), lr) for name in names]
        roots = torch._foreach_div(nu, [1 - beta2**count for count, *_ in scalars])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, config.eps)
        torch._foreach_div_(g, roots)
        decays_here = [i for i, name in enumerate(names) if name in decayed]
        if decay and decays_here:
            torch._foreach_add_([g[i] for i in decays_here], [y[i] for i in decays_here], alpha=decay)
        lrs = [step_lr * ok for *_, step_lr, _ in scalars]
        shares = [share * ok for *_, share in scalars]
        towards = torch._foreach_sub(z, y)
        torch._foreach_mul_(towards, shares)
        torch._foreach_add_(y, towards)
        steps = torch._foreach_mul(g, [step_lr * (1 - beta1 * (1 - c)) for step_lr, c in zip(lrs, shares, strict=True)])
        torch._foreach_sub_(y, steps)
        torch._foreach_sub_(z, torch._foreach_mul(g, lrs))
        for name, (count, weight_sum, lr_max, _, _) in zip(names, scalars, strict=True):
            for key, value in (("count", count), ("weight_sum", weight_sum), ("lr_max", lr_max)):
                held = opt_state[key][name]
                held.copy_(torch.where(ok, value, held))

    def eval_params(params: Params, opt_state: PyTree) -> Params:
        """x, the average, for the parameters that are trained; the others as they are."""
        z = opt_state["z"]
        return {
            name: ((y - (1 - beta1) * z[name]) / beta1).to(y.dtype) if name in z else y for name, y in params.items()
        }

    return Optimizer(init, update, update_, eval_params)
