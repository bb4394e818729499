"""Learning-rate schedules: the multiplier of the base lr at update n, a function of n and nothing else.

n counts the updates made before, from 0. Warmup is linear and never zero, (n + 1) / warmup; the last update of the run
is at the end of the decay (t = 1); after that the floor holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from forge.config import REX, WSD, Constant, Cosine, Linear, NoSchedule, SchedulerConfig
from forge.config.job import DECAY_SHARE, WARMUP_SHARE

Shape = Callable[[Tensor], Tensor]


class Schedule:
    """Multiplier at update n: `schedule(5)` is a float; `schedule(tensor)` a tensor of its shape, with no host sync."""

    def __init__(self, multiplier: Callable[[Tensor], Tensor]) -> None:
        self._multiplier = multiplier

    @overload
    def __call__(self, step: int) -> float: ...
    @overload
    def __call__(self, step: Tensor) -> Tensor: ...
    def __call__(self, step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):
            return self._multiplier(step.to(torch.float32))
        return float(self._multiplier(torch.tensor(step, dtype=torch.float64)))


def build_scheduler(config: SchedulerConfig, total_steps: int, warmup_steps: int | None = None) -> Schedule:
    """The schedule that the config's class names.

    Args:
        total_steps: updates of the run; `train.steps`.
        warmup_steps: overrides the config's; where both are unset, 5 % of the run.
    """
    if isinstance(config, NoSchedule):
        return Schedule(torch.ones_like)
    warmup = warmup_steps if warmup_steps is not None else config.warmup_steps
    if warmup is None:
        warmup = int(total_steps * WARMUP_SHARE)
    if isinstance(config, Constant):
        return Schedule(_with_warmup(warmup, torch.ones_like))
    if isinstance(config, WSD):
        stable = config.stable_steps
        if stable is None:
            stable = max(0, total_steps - warmup - round(total_steps * DECAY_SHARE))
        # Updates warmup .. warmup + stable - 1 are at the peak, the last of them at t = 0.
        start, length = warmup + max(stable, 1) - 1, None
        floor, shape = config.min_lr_ratio, _DECAYS[config.decay]
    else:
        start, length, floor = warmup, config.decay_steps, config.min_lr_ratio
        shape = _shape(config)
    span = max(1, (length if length is not None else total_steps - start) - 1)

    def after_warmup(n: Tensor) -> Tensor:
        t = ((n - start) / span).clamp(0.0, 1.0)
        if isinstance(config, REX):
            return shape(t).clamp(min=floor)
        return floor + (1 - floor) * shape(t)

    return Schedule(_with_warmup(warmup, after_warmup))


def _with_warmup(warmup: int, after: Shape) -> Shape:
    if warmup == 0:
        return after
    return lambda n: torch.where(n < warmup, (n + 1) / warmup, after(n))


def _shape(config: Cosine | Linear | REX) -> Shape:
    """Decay from 1 at t = 0 to 0 at t = 1."""
    if isinstance(config, Cosine):
        return _DECAYS["cosine"]
    if isinstance(config, Linear):
        return _DECAYS["linear"]
    if config.alpha is not None:
        alpha = config.alpha
        return lambda t: (1 - t) ** alpha
    return lambda t: (1 - t) / (1 - t / 2)  # Chen, Wolfe, Kyrillidis 2021, eq. 1


_DECAYS: dict[str, Shape] = {
    "cosine": lambda t: (1 + torch.cos(math.pi * t)) / 2,
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: (1 - t) ** 0.5,
    "one_minus_sqrt": lambda t: 1 - t**0.5,  # Haegele et al. 2024
}
