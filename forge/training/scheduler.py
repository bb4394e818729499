"""Learning-rate schedules: the multiplier of the base lr at update n, a function of n and nothing else.

n counts the updates made before, from 0. Warmup is linear and never zero, (n + 1) / warmup; the last update of the run
is at the end of the decay (t = 1); after that the floor holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from forge.config import REX, WSD, Constant, Cosine, DataPhase, JobConfig, Linear, NoSchedule, SchedulerConfig
from forge.config.job import DECAY_SHARE, WARMUP_SHARE

Shape = Callable[[Tensor], Tensor]


class Schedule:
    """Multiplier at update n: `schedule(5)` is a float; `schedule(tensor)` a tensor of its shape, with no host sync."""

    def __init__(self, multiplier: Callable[[Tensor], Tensor]) -> None:
        self.at = multiplier

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: Tensor) -> Tensor: ...
    def __call__(self, step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):
            return self.at(step.to(torch.float32))
        return float(self.at(torch.tensor(step, dtype=torch.float64)))


def build_scheduler(config: SchedulerConfig, total_steps: int) -> Schedule:
    """The schedule that the config's class names.

    Args:
        total_steps: updates of the run, `train.steps`; the last one ends the decay. Where `warmup_steps` is unset,
            5 % of them are warmup; where wsd's `stable_steps` is, the last 20 % are decay.
    """
    if isinstance(config, NoSchedule):
        return Schedule(torch.ones_like)
    warmup = int(total_steps * WARMUP_SHARE) if config.warmup_steps is None else config.warmup_steps
    if isinstance(config, Constant):
        return Schedule(_with_warmup(warmup, torch.ones_like))
    start, updates, floor = warmup, None, config.min_lr_ratio
    if isinstance(config, WSD):
        stable = config.stable_steps
        if stable is None:
            stable = max(0, total_steps - warmup - round(total_steps * DECAY_SHARE))
        start = warmup + stable
    else:
        updates = config.decay_steps
    span = max(1, (total_steps - start if updates is None else updates) - 1)
    shape = _shape(config)

    def after_warmup(n: Tensor) -> Tensor:
        t = ((n - start) / span).clamp(0.0, 1.0)
        if isinstance(config, REX):
            return shape(t).clamp(min=floor)
        return floor + (1 - floor) * shape(t)

    return Schedule(_with_warmup(warmup, after_warmup))


def scaled_by_phase(schedule: Schedule, phases: Sequence[DataPhase]) -> Schedule:
    """The schedule times the `lr_scale` of the data phase that an update is in."""
    if not phases:
        return schedule

    def scaled(n: Tensor) -> Tensor:
        scale = torch.ones_like(n)
        for phase in phases:
            scale = torch.where(n >= phase.start_step, phase.lr_scale, scale)
        return scale * schedule.at(n)

    return Schedule(scaled)


def learning_rate(config: JobConfig, step: int) -> float:
    """A job's learning rate at update `step`, from 0."""
    schedule = scaled_by_phase(build_scheduler(config.scheduler, config.train.steps), config.data.all_phases)
    return config.optimizer.lr * schedule(step)


def _with_warmup(warmup: int, after: Shape) -> Shape:
    if warmup == 0:
        return after
    return lambda n: torch.where(n < warmup, (n + 1) / warmup, after(n))


def _shape(config: Cosine | Linear | WSD | REX) -> Shape:
    """Decay from 1 at t = 0 to 0 at t = 1."""
    if not isinstance(config, REX):
        return _DECAYS[config.decay if isinstance(config, WSD) else config.name]
    if config.alpha is None:
        return lambda t: (1 - t) / (1 - t / 2)  # Chen, Wolfe, Kyrillidis 2021, eq. 1
    alpha = config.alpha
    return lambda t: (1 - t) ** alpha


_DECAYS: dict[str, Shape] = {
    "cosine": lambda t: (1 + torch.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: (1 - t) ** 0.5,
    "one_minus_sqrt": lambda t: 1 - t**0.5,  # Haegele et al. 2024
}
