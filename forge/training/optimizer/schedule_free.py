"""Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled", algorithm 1).

The parameters are y, where the gradient is taken; the state holds z, the iterate of the base optimizer. The average x,
which evaluation and export use, is recovered: y = (1 - beta1) z + beta1 x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import ScheduleFree
from forge.pytree import PyTree, wide
from forge.training.optimizer.core import (
    Optimizer,
    Params,
    bias_correction,
    gated,
    keep_unless,
    root,
    scalar_zeros,
    zeros,
)
from forge.training.optimizer.roles import Role, decayed_names


def schedule_free(config: ScheduleFree, roles: dict[str, Role]) -> Optimizer:
    """State: `z` and `nu`, fp32 of the parameter's shape; `count` and `weight_sum`, fp32 ().

    At update k = 1, 2, ...: lr_k = lr min(1, k / warmup); nu = beta2 nu + (1 - beta2) g^2;
    d = g / (sqrt(nu / (1 - beta2^k)) + eps) + wd y; z -= lr_k d; c = w_k / sum of w with w_k = k^r lr_k^p;
    x = (1 - c) x + c z; y = (1 - beta1) z + beta1 x.
    Without x: y += c (z - y) - lr_k (1 - beta1 (1 - c)) d, with z as it was before.
    """
    beta1, beta2, decayed = config.beta1, config.beta2, decayed_names(roles)

    def init(params: Params) -> PyTree:
        z = {name: p.to(wide(p), copy=True) for name, p in params.items()}
        return {"z": z, "nu": zeros(params), "count": scalar_zeros(params), "weight_sum": scalar_zeros(params)}

    def advance(count: Tensor, weight_sum: Tensor, lr: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Count and weight sum after an update; this update's lr and its share c in the average."""
        count = count + 1
        if config.warmup_steps:
            lr = lr * (count / config.warmup_steps).clamp(max=1.0)
        weight = count**config.r * lr**config.weight_lr_power
        weight_sum = weight_sum + weight
        share = weight / torch.where(weight_sum > 0, weight_sum, 1.0)
        return count, weight_sum, lr, share

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        new, z, nu, count, total = map(dict, (params, *(opt_state[key] for key in ("z", "nu", "count", "weight_sum"))))
        for name, grad in grads.items():
            y, g = params[name], grad.to(nu[name].dtype)
            count[name], total[name], step_lr, share = advance(count[name], total[name], lr)
            nu[name] = beta2 * nu[name] + (1 - beta2) * g * g
            step = g / (root(nu[name] / bias_correction(beta2, count[name])) + config.eps)
            if name in decayed:
                step = step + config.weight_decay * y
            moved = y + share * (z[name] - y) - step_lr * (1 - beta1 * (1 - share)) * step
            new[name] = moved.to(y.dtype)
            z[name] = z[name] - step_lr * step
        return new, {"z": z, "nu": nu, "count": count, "weight_sum": total}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        names = list(grads)
        if not names:
            return
        held = {key: torch.stack([opt_state[key][name] for name in names]) for key in ("count", "weight_sum")}
        count, total, lrs, shares = advance(held["count"], held["weight_sum"], lr)
        lrs, shares = (lrs * ok).expand_as(shares), shares * ok
        pulls, corrections = lrs * (1 - beta1 * (1 - shares)), bias_correction(beta2, count)
        kept = keep_unless(ok, beta2)
        for i, (name, g) in enumerate(zip(names, gated(list(grads.values()), scale, ok), strict=True)):
            y, z, nu = params[name], opt_state["z"][name], opt_state["nu"][name]
            nu.mul_(kept).addcmul_(g, g, value=1 - beta2)
            step = g.div_((nu / corrections[i]).sqrt_().add_(config.eps))
            if name in decayed:
                step.add_(y, alpha=config.weight_decay)
            y.add_((z - y).mul_(shares[i])).sub_(step * pulls[i])
            z.sub_(step.mul_(lrs[i]))
            opt_state["count"][name].add_(ok)
            opt_state["weight_sum"][name].copy_(torch.where(ok, total[i], opt_state["weight_sum"][name]))

    def eval_params(params: Params, opt_state: PyTree) -> Params:
        """x, the average, for the parameters that are trained; the others as they are."""
        z = opt_state["z"]
        return {
            name: ((y - (1 - beta1) * z[name]) / beta1).to(y.dtype) if name in z else y for name, y in params.items()
        }

    return Optimizer(init, update, update_, eval_params)
