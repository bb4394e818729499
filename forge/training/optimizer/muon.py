"""Muon (Jordan et al. 2024): orthogonalised momentum for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from forge.config import Muon
from forge.errors import ConfigError
from forge.pytree import PyTree
from forge.training.optimizer.adamw import build_adamw
from forge.training.optimizer.core import Optimizer, Params, gated, keep_unless, shrink, zeros
from forge.training.optimizer.newton_schulz import orthogonalise
from forge.training.optimizer.roles import Role, decayed_names

BATCH_ELEMENTS = 2**24
"""Elements of matrices that are orthogonalised in one batch, at most."""

_NS_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}

OrthogonalSteps = Callable[[Params, Muon], Params]
"""(momenta, config) -> orthogonalised and scaled updates, by name."""


def muon(config: Muon, roles: dict[str, Role], steps_of: OrthogonalSteps | None = None) -> Optimizer:
    """State: `momentum`, fp32 of the shape of each hidden matrix; AdamW's `mu`, `nu` and `count` for the rest.

    m = momentum m + (1 - momentum) g; p -= lr (scaling * orthogonalise(m or its Nesterov lookahead) + wd p). An expert
    tensor (E, in, out) is E matrices. AdamW's learning rate follows the schedule: lr * adam_lr / config.lr.

    Args:
        steps_of: replaces `orthogonal_steps` where the matrices are sharded.

    Raises:
        ConfigError: lr is 0 and adam_lr is not.
    """
    hidden = {name for name, role in roles.items() if role == "hidden"}
    decayed = decayed_names(roles)
    adam = build_adamw(config.adam_beta1, config.adam_beta2, config.adam_eps, config.weight_decay, decayed)
    if config.adam_lr and not config.lr:
        raise ConfigError("optimizer.lr = 0 stops muon's AdamW too, whose lr follows it: set optimizer.adam_lr = 0 too")
    ratio = config.adam_lr / config.lr if config.lr else 0.0
    beta = config.momentum
    steps_of = steps_of or orthogonal_steps

    def split(named: Params) -> tuple[Params, Params]:
        mine = {name: value for name, value in named.items() if name in hidden}
        return mine, {name: value for name, value in named.items() if name not in hidden}

    def init(params: Params) -> PyTree:
        mine, rest = split(params)
        return {"momentum": zeros(mine), **adam.init(rest)}

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        mine, rest = split(grads)
        momentum, new = dict(opt_state["momentum"]), dict(params)
        ahead: Params = {}
        for name, grad in mine.items():
            g = (1 - beta) * grad.to(momentum[name].dtype)
            momentum[name] = beta * momentum[name] + g
            ahead[name] = beta * momentum[name] + g if config.nesterov else momentum[name]
        for name, step in steps_of(ahead, config).items():
            kept = 1 - lr * config.weight_decay if name in decayed else 1.0
            new[name] = (params[name] * kept - lr * step).to(params[name].dtype)
        adam_state = {key: part for key, part in opt_state.items() if key != "momentum"}
        new, adam_state = adam.update(rest, adam_state, new, lr * ratio)
        return new, {"momentum": momentum, **adam_state}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        mine, rest = split(grads)
        assert adam.update_ is not None
        adam.update_(rest, opt_state, params, lr * ratio, scale, ok)
        if not mine:
            return
        names, g = list(mine), gated(list(mine.values()), scale, ok)
        m = [opt_state["momentum"][name] for name in names]
        torch._foreach_mul_(g, 1 - beta)
        torch._foreach_mul_(m, keep_unless(ok, beta))
        torch._foreach_add_(m, g)
        ahead = torch._foreach_add(g, m, alpha=beta) if config.nesterov else m
        steps = steps_of(dict(zip(names, ahead, strict=True)), config)
        lr = lr * ok
        shrink([params[name] for name in names if name in decayed], lr * config.weight_decay)
        torch._foreach_sub_([params[name] for name in names], torch._foreach_mul([steps[n] for n in names], lr))

    return Optimizer(init, update, update_)


def orthogonal_steps(momenta: Params, config: Muon) -> Params:
    """Orthogonalised and scaled updates; matrices of one shape share one batched iteration."""
    by_shape: dict[tuple[tuple[int, ...], bool], list[str]] = defaultdict(list)
    for name, momentum in momenta.items():
        by_shape[tuple(momentum.shape[-2:]), momentum.dim() > 2].append(name)
    steps: Params = {}
    for (shape, experts), names in by_shape.items():
        scale = muon_scale(shape[::-1] if experts else shape, config.scaling)
        for batch in _batches(names, momenta):
            stacks = [momenta[name].reshape(-1, *shape) for name in batch]
            orthogonal = orthogonalise(torch.cat(stacks), config.ns_steps, _NS_DTYPES[config.ns_dtype]) * scale
            for name, part in zip(batch, orthogonal.split([len(stack) for stack in stacks]), strict=True):
                steps[name] = part.view_as(momenta[name])
    return steps


def _batches(names: list[str], momenta: Params) -> list[list[str]]:
    """Cut a list where its matrices exceed BATCH_ELEMENTS: large ones gain nothing from batching, and cost memory."""
    batches: list[list[str]] = []
    room = 0
    for name in names:
        room -= momenta[name].numel()
        if room < 0:
            batches.append([])
            room = BATCH_ELEMENTS - momenta[name].numel()
        batches[-1].append(name)
    return batches


def muon_scale(shape: tuple[int, ...], scaling: str) -> float:
    """Factor of an orthogonal update of (rows, cols), a matrix that makes `rows` numbers out of `cols`.

    spectral: sqrt(max(1, rows / cols)) (Jordan et al. 2024); rms: 0.2 sqrt(max(rows, cols)), which gives AdamW's root
    mean square (Liu et al. 2025, "Muon is scalable for LLM training", sec. 2.2).
    """
    rows, cols = shape
    return max(1.0, rows / cols) ** 0.5 if scaling == "spectral" else 0.2 * max(rows, cols) ** 0.5
