"""AdamW (Loshchilov & Hutter 2019), fp32 moments, a step count for each parameter."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from forge.config import AdamW
from forge.pytree import PyTree, widened
from forge.training.optimizer.core import Optimizer, Params, bias_correction, root, scalar_zeros, zeros
from forge.training.optimizer.roles import Role, decayed_names


def adamw(config: AdamW, roles: dict[str, Role]) -> Optimizer:
    """State: `mu` and `nu`, fp32 of the parameter's shape, and `count`, fp32 ()."""
    return build_adamw(config.beta1, config.beta2, config.eps, config.weight_decay, decayed_names(roles))


def build_adamw(beta1: float, beta2: float, eps: float, weight_decay: float, decayed: Collection[str]) -> Optimizer:
    """AdamW that decays the named parameters: p -= lr (mu^ / (sqrt(nu^) + eps) + wd p), ^ = bias-corrected."""

    def init(params: Params) -> PyTree:
        return {"mu": zeros(params), "nu": zeros(params), "count": scalar_zeros(params)}

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        mu, nu, count = (dict(opt_state[key]) for key in ("mu", "nu", "count"))
        new = dict(params)
        for name, grad in grads.items():
            g = grad.to(mu[name].dtype)
            count[name] = count[name] + 1
            mu[name] = beta1 * mu[name] + (1 - beta1) * g
            nu[name] = beta2 * nu[name] + (1 - beta2) * g * g
            corrected = mu[name] / bias_correction(beta1, count[name])
            size = root(nu[name] / bias_correction(beta2, count[name]))
            kept = 1 - lr * weight_decay if name in decayed else 1.0
            new[name] = (params[name] * kept - lr * corrected / (size + eps)).to(params[name].dtype)
        return new, {"mu": mu, "nu": nu, "count": count}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        mu, nu, count = (opt_state[key] for key in ("mu", "nu", "count"))
        if not grads:
            return
        torch._foreach_add_([count[name] for name in grads], ok.to(torch.float32))
        found_inf, divisor = (~ok).to(torch.float32), scale.reciprocal()  # the kernel's names for skip and clip
        for names, decay in _groups(grads, decayed, weight_decay):
            torch._fused_adamw_(
                [params[name] for name in names],
                [widened(grads[name]) for name in names],
                [mu[name] for name in names],
                [nu[name] for name in names],
                [],
                [count[name] for name in names],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=found_inf,
            )

    return Optimizer(init, update, update_)


def _groups(grads: Params, decayed: Collection[str], weight_decay: float) -> list[tuple[list[str], float]]:
    with_decay = [name for name in grads if name in decayed]
    without = [name for name in grads if name not in decayed]
    return [(names, decay) for names, decay in ((with_decay, weight_decay), (without, 0.0)) if names]
