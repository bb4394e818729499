"""Optimizers as pure functions: `build_optimizer(config, roles)` matches on the config's type."""

from __future__ import annotations

from functools import partial

from forge.config import SGD, AdamW, JobConfig, Lion, Muon, OptimizerConfig, ScheduleFree
from forge.training.optimizer.adamw import adamw
from forge.training.optimizer.core import Optimizer, apply_update, eval_params, extend, init_opt_state
from forge.training.optimizer.lion import lion
from forge.training.optimizer.master import with_master_weights
from forge.training.optimizer.muon import OrthogonalSteps, muon
from forge.training.optimizer.roles import Role, decays, parameter_roles
from forge.training.optimizer.schedule_free import schedule_free
from forge.training.optimizer.sgd import sgd
from forge.training.optimizer.width import scaled_by_width

__all__ = [
    "Optimizer", "Role", "apply_update", "build_optimizer", "decays", "eval_params", "extend", "init_opt_state",
    "job_optimizer", "parameter_roles", "with_master_weights",
]  # fmt: skip


def build_optimizer(
    config: OptimizerConfig,
    roles: dict[str, Role],
    *,
    width: float = 1.0,
    orthogonal_steps: OrthogonalSteps | None = None,
) -> Optimizer:
    """The optimizer that the config's class names.

    Args:
        roles: from `parameter_roles(model)`: which parameters decay, and which are Muon's.
        width: `ModelConfig.width_multiplier`, for muP's learning rates.
        orthogonal_steps: how Muon orthogonalises sharded matrices.
    """
    if width != 1:
        return scaled_by_width(partial(_build, roles, orthogonal_steps), config, roles, width)
    return _build(roles, orthogonal_steps, config)


def job_optimizer(
    config: JobConfig, roles: dict[str, Role], *, orthogonal_steps: OrthogonalSteps | None = None
) -> Optimizer:
    """The optimizer of a job: by its model's width, and with master weights where parameters are narrower than fp32."""
    optimizer = build_optimizer(
        config.optimizer, roles, width=config.model.width_multiplier, orthogonal_steps=orthogonal_steps
    )
    return optimizer if config.train.param_dtype == "fp32" else with_master_weights(optimizer)


def _build(roles: dict[str, Role], orthogonal_steps: OrthogonalSteps | None, config: OptimizerConfig) -> Optimizer:
    match config:
        case AdamW():
            return adamw(config, roles)
        case Muon():
            return muon(config, roles, orthogonal_steps)
        case Lion():
            return lion(config, roles)
        case ScheduleFree():
            return schedule_free(config, roles)
        case SGD():
            return sgd(config, roles)
