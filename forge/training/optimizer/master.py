"""fp32 masters for parameters stored in a lower precision, whose steps would round to nothing (bf16 has 8 bits)."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.pytree import PyTree, wide, widened
from forge.training.optimizer.core import Optimizer, Params


def with_master_weights(optimizer: Optimizer) -> Optimizer:
    """Keep a fp32 copy of every trained parameter in the state, update that, and round it into the parameter.

    State: the inner optimizer's, and `master`, fp32 of the parameter's shape. A skipped update rounds the unchanged
    masters again, which gives the same bits.
    """

    def init(params: Params) -> PyTree:
        masters = {name: p.to(wide(p), copy=True) for name, p in params.items()}
        return {**optimizer.init(masters), "master": masters}

    def split(opt_state: PyTree) -> tuple[PyTree, Params]:
        return {key: part for key, part in opt_state.items() if key != "master"}, opt_state["master"]

    def update(grads: Params, opt_state: PyTree, params: Params, lr: Tensor) -> tuple[Params, PyTree]:
        inner, masters = split(opt_state)
        new, inner = optimizer.update({name: widened(g) for name, g in grads.items()}, inner, masters, lr)
        rounded = {name: new[name].to(p.dtype) if name in grads else p for name, p in params.items()}
        return rounded, {**inner, "master": new}

    def update_(grads: Params, opt_state: PyTree, params: Params, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        inner, masters = split(opt_state)
        assert optimizer.update_ is not None
        optimizer.update_({name: widened(g) for name, g in grads.items()}, inner, masters, lr, scale, ok)
        if grads:
            torch._foreach_copy_([params[name] for name in grads], [masters[name] for name in grads])

    def eval_params(params: Params, opt_state: PyTree) -> Params:
        inner, masters = split(opt_state)
        exact = optimizer.eval_params(masters, inner)
        return {name: exact[name].to(p.dtype) if name in exact else p for name, p in params.items()}

    return Optimizer(init, update, update_ if optimizer.update_ is not None else None, eval_params)
