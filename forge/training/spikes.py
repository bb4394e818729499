"""Spikes: updates whose loss or gradient norm stands out from those just before, found on the device and skipped.

The rule is that of OLMo-core's skip-step optimizers: v is a spike where v > mean + sigma * std of the last values, for
the loss or the gradient norm. Spikes are among the last values too, so that a level that stays becomes the usual one.
Lower than usual is never one, and nothing is before the window is full (OLMo-core: half full).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge.config import TrainConfig
from forge.errors import ConfigError
from forge.pytree import PyTree

SpikeFilter = Callable[[PyTree, Tensor, Tensor, Tensor], tuple[Tensor, PyTree]]
"""(extras, loss (), grad_norm (), whether both are finite, bool ()) -> (whether the update is made, extras)."""


def init_spikes(config: TrainConfig, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
    """What `TrainState.extras` holds of the updates before: an empty window; nothing where spikes are not looked for.

    `loss` and `grad_norm` are rings, fp32 (window,); `seen` counts what entered them, int64 ().
    """
    if config.spike_sigma is None:
        return {}
    rings = {name: torch.zeros(config.spike_window, device=device) for name in ("loss", "grad_norm")}
    return {"spikes": {**rings, "seen": torch.zeros((), dtype=torch.int64, device=device)}}


def build_spike_filter(config: TrainConfig) -> SpikeFilter:
    """Refuse spikes, and keep the window of finite values; pure, and without waiting for the device.

    Loss and norm are those of the global batch, so every rank decides alike.

    Raises:
        ConfigError: (the filter) the state was made without a window.
    """
    sigma, window = config.spike_sigma, config.spike_window
    if sigma is None:
        return lambda extras, loss, grad_norm, good: (good, extras)

    def usual(value: Tensor, ring: Tensor) -> Tensor:
        std, mean = torch.std_mean(ring.double())
        return value <= mean + sigma * std

    def spike_filter(extras: PyTree, loss: Tensor, grad_norm: Tensor, good: Tensor) -> tuple[Tensor, PyTree]:
        if "spikes" not in extras:
            raise ConfigError("train.spike_sigma is set, but the state has no window: add init_spikes to its extras")
        spikes, values = extras["spikes"], {"loss": loss, "grad_norm": grad_norm}
        calm = usual(loss, spikes["loss"]) & usual(grad_norm, spikes["grad_norm"])
        slots = torch.arange(window, device=spikes["loss"].device)
        enters = good & (slots == spikes["seen"] % window)
        rings = {name: torch.where(enters, value.to(torch.float32), spikes[name]) for name, value in values.items()}
        is_full = spikes["seen"] >= window
        return good & (calm | ~is_full), {**extras, "spikes": {**rings, "seen": spikes["seen"] + good}}

    return spike_filter
