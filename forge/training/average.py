"""An average of the parameters over the updates, which often evaluates better than the last of them.

Exponential, and corrected for its start as Adam's moments are (Polyak & Juditsky 1992; Kingma & Ba 2015, sec. 3): after
update n it is the mean of the parameters after updates 1 to n, that of update k weighing decay^(n - k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import TrainConfig
from forge.distributed.shards import as_sharded, local_data, tree_local, tree_sharded
from forge.errors import ConfigError
from forge.pytree import PyTree, widened
from forge.training.optimizer.core import Optimizer, Params, eval_params, zeros
from forge.training.state import TrainState


def init_ema(config: TrainConfig, params: Params) -> PyTree:
    """What `TrainState.extras` holds of the average at the start: nothing where `train.ema_decay` is unset.

    `mean` has the shapes and layout of the parameters, fp32 at least; `weight` is fp32 (), 1 - decay^n after n updates.
    """
    if config.ema_decay is None:
        return {}
    mean = tree_sharded(zeros(tree_local(params)), params)
    return {"ema": {"mean": mean, "weight": torch.zeros((), device=next(iter(params.values())).device)}}


def average(extras: PyTree, params: Params, good: Tensor, decay: float | None, *, donate: bool = False) -> PyTree:
    """Take the parameters after an update into the average; nothing moves where `good`, bool (), is false.

    The mean itself is kept, not a sum to be divided: what does not change is averaged to the bit.

    Args:
        decay: `train.ema_decay`.
        donate: the mean may be overwritten.

    Raises:
        ConfigError: the state was made without an average.
    """
    if decay is None:
        return extras
    if "ema" not in extras:
        raise ConfigError("train.ema_decay is set, but the state keeps no average: add init_ema to its extras")
    mean, weight, rate = extras["ema"]["mean"], extras["ema"]["weight"], (1 - decay) * good
    weight = weight + rate * (1 - weight)
    share = torch.where(good, rate / weight, 0.0)
    lerp = torch.Tensor.lerp_ if donate else torch.lerp
    with torch.no_grad():
        moved = {name: lerp(local_data(m), widened(local_data(params[name])), share) for name, m in mean.items()}
    return {**extras, "ema": {"mean": tree_sharded(moved, mean), "weight": weight}}


def averaged(params: Params, extras: PyTree) -> Params:
    """The average in the dtype of the parameters; they themselves before the first update, or where none is kept."""
    if "ema" not in extras:
        return params
    begun, found = extras["ema"]["weight"] > 0, {}
    for name, mean in extras["ema"]["mean"].items():
        part = local_data(params[name])
        found[name] = as_sharded(torch.where(begun, local_data(mean).to(part.dtype), part), params[name])
    return found


def params_to_use(optimizer: Optimizer, state: TrainState) -> Params:
    """The parameters to evaluate, to sample from and to export: the average where `train.ema_decay` keeps one,
    otherwise what the optimizer says, whose own average is schedule-free's.
    """
    return averaged(eval_params(optimizer, state.params, state.opt_state), state.extras)
