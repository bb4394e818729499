"""The training step: one body for every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge.config import JobConfig
from forge.metrics.timeline import OPTIMIZER, span
from forge.pytree import foreach_norm, tree_norm
from forge.training.average import average
from forge.training.extras import balance_routers, routing
from forge.training.grad import ValueAndGrad, clip_factor
from forge.training.loss import LossSums
from forge.training.optimizer import Optimizer, apply_update
from forge.training.spikes import build_spike_filter
from forge.training.state import Batch, StepResult, TrainState, take

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepResult]]
Schedule = Callable[[Tensor], Tensor]


def build_train_step(
    config: JobConfig,
    *,
    value_and_grad: ValueAndGrad,
    optimizer: Optimizer,
    schedule: Schedule,
    donate: bool = False,
    global_norm: Callable[[dict[str, Tensor]], Tensor] | None = None,
) -> TrainStep:
    """Build `train_step(state, batch) -> (state, StepResult)`.

    An update with a non-finite loss or gradient, without a single target, or (with `train.spike_sigma`) with a spike
    of either is skipped: parameters, optimizer state and token count stay as they are, `skipped` is true, and the step
    counter moves on to the next batch. All of it is decided on the device.

    Args:
        config: gives `optimizer.lr`, `train.grad_clip_norm`, what counts as a spike, `train.ema_decay`, and how routers
            balance.
        value_and_grad: the seam that knows about devices; see `forge.training.grad`.
        optimizer: (init, update) and what goes with them.
        schedule: multiplier of the base learning rate at update n, from 0.
        donate: let the step reuse the storage of the state that it is given, which is dead then (`DonatedError`).
            With False nothing is written in place and the step is a pure function under `torch.func`.
        global_norm: 2-norm of all gradients; of sharded ones over all ranks. None = over those of this process.

    Raises:
        ConfigError: (the step) the state lacks the window or the average that the config asks for.
    """
    norm = global_norm or (foreach_norm if donate else tree_norm)
    base_lr, max_norm = config.optimizer.lr, config.train.grad_clip_norm
    without_spikes = build_spike_filter(config.train)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepResult]:
        if donate:
            state = take(state)
        lr = (base_lr * schedule(state.step)).to(torch.float32)
        sums, grads = value_and_grad(state.params, state.extras, batch)
        grad_norm = norm(grads)
        finite = torch.isfinite(grad_norm) & torch.isfinite(sums.total) & (sums.tokens > 0)
        loss = sums.total / sums.tokens.clamp(min=1)
        good, extras = without_spikes(state.extras, loss, grad_norm, finite)
        with span(OPTIMIZER):
            params, opt_state = apply_update(
                optimizer,
                grads,
                state.opt_state,
                state.params,
                lr=lr,
                scale=clip_factor(grad_norm, max_norm),
                ok=good,
                donate=donate,
            )
            extras = balance_routers(extras, sums.router_counts, good, config.model.moe.bias_update_rate)
            extras = average(extras, params, good, config.train.ema_decay, donate=donate)
        after = TrainState(
            step=state.step + 1,
            tokens=state.tokens + sums.tokens * good,
            params=params,
            opt_state=opt_state,
            extras=extras,
        )
        return after, _result(sums, loss, grad_norm, lr, ~good, routing(sums, config.model.moe.top_k))

    return train_step


def _result(
    sums: LossSums, loss: Tensor, grad_norm: Tensor, lr: Tensor, skipped: Tensor, routers: dict[str, Tensor]
) -> StepResult:
    targets = sums.tokens.clamp(min=1)
    return StepResult(
        loss=loss,
        ce_loss=sums.ce / targets,
        z_loss=sums.z / targets,
        aux_loss=sums.aux / targets,
        grad_norm=grad_norm,
        lr=lr,
        tokens=sums.tokens,
        skipped=skipped,
        source_loss=sums.source_ce,
        source_tokens=sums.source_tokens,
        **routers,
    )
