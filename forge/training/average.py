"""An average of the parameters over the updates, which often evaluates better than the last of them.

Exponential, and divided by its weights as Adam's moments are (Polyak & Juditsky 1992; Kingma & Ba 2015, sec. 3): after
update n it is the mean of the parameters after updates 1 to n, that of update k weighing decay^(n - k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import TrainConfig
from forge.distributed.shards import as_sharded, local_data
from forge.errors import ConfigError
from forge.pytree import PyTree, wide
from forge.training.optimizer import Optimizer, eval_params
from forge.training.state import TrainState

Params = dict[str, Tensor]


def init_ema(config: TrainConfig, params: Params) -> PyTree:
    """What `TrainState.extras` holds of the average at the start: nothing where `train.ema_decay` is unset.

    `sum` has the shapes and layout of the parameters, fp32 at least; `weight` is fp32 (), what the sums are divided by.
    """
    if config.ema_decay is None:
        return {}
    sums = {name: as_sharded(torch.zeros_like(local_data(p), dtype=wide(p)), p) for name, p in params.items()}
    return {"ema": {"sum": sums, "weight": torch.zeros((), device=next(iter(params.values())).device)}}


def average(extras: PyTree, params: Params, good: Tensor, decay: float | None, *, donate: bool = False) -> PyTree:
    """Take the parameters after an update into the average; nothing moves where `good`, bool (), is false.

    Args:
        decay: `train.ema_decay`.
        donate: the sums may be overwritten.

    Raises:
        ConfigError: the state was made without an average.
    """
    if decay is None:
        return extras
    if "ema" not in extras:
        raise ConfigError("train.ema_decay is set, but the state keeps no average: add init_ema to its extras")
    sums, rate = extras["ema"]["sum"], (1 - decay) * good
    lerp = torch.Tensor.lerp_ if donate else torch.lerp
    with torch.no_grad():
        for_all = {name: lerp(local_data(s), local_data(params[name]).to(wide(s)), rate) for name, s in sums.items()}
    sums = {name: as_sharded(part, sums[name]) for name, part in for_all.items()}
    weight = extras["ema"]["weight"]
    return {**extras, "ema": {"sum": sums, "weight": weight + rate * (1 - weight)}}


def averaged(params: Params, extras: PyTree) -> Params:
    """The average in the dtype of the parameters; they themselves before the first update, or where none is kept."""
    if "ema" not in extras:
        return params
    weight, found = extras["ema"]["weight"], {}
    for name, total in extras["ema"]["sum"].items():
        part = local_data(params[name])
        mean = torch.where(weight > 0, local_data(total) / weight, part).to(part.dtype)
        found[name] = as_sharded(mean, params[name])
    return found


def params_to_use(optimizer: Optimizer, state: TrainState) -> Params:
    """The parameters to evaluate, to sample from and to export: the average where `train.ema_decay` keeps one,
    otherwise what the optimizer says, whose own average is schedule-free's.
    """
    return averaged(eval_params(optimizer, state.params, state.opt_state), state.extras)
