"""The values that flow through a training step."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from attrs import evolve, fields, frozen
from torch import Tensor

from forge.data.batch import IGNORE, Batch
from forge.errors import DonatedError
from forge.pytree import PyTree, register_closed_node, register_node

__all__ = ["IGNORE", "Batch", "StepResult", "TrainState", "init_state", "is_donated", "take"]


@register_node
@frozen
class TrainState:
    """What updates depend on and change.

    A checkpoint holds it, and beside it the config and notes: the position of a stream, the jumps of rollbacks, the
    smoothed loss.
    """

    step: Tensor  # int64 (): batches consumed; the schedule and the data position read it
    tokens: Tensor  # int64 (): target tokens trained on
    params: dict[str, Tensor]  # by the module's fully-qualified names
    opt_state: PyTree
    extras: PyTree  # what changes without a gradient: router biases, spike window, average


@register_node
@frozen
class StepResult:
    """What one update did; every field a tensor on the device, none waited for."""

    loss: Tensor  # fp32 (): the objective, per target token of the global batch
    ce_loss: Tensor  # fp32 (): cross entropy alone
    z_loss: Tensor  # fp32 (): weighted z-loss
    aux_loss: Tensor  # fp32 (): weighted auxiliary losses of the routers
    grad_norm: Tensor  # fp32 (): before clipping
    lr: Tensor  # fp32 (): of this update
    tokens: Tensor  # int64 (): target tokens of the global batch
    skipped: Tensor  # bool (): the update was not made (not finite, no target, a spike)
    source_loss: Tensor | None = None  # fp32 (sources,): summed cross entropy by source
    source_tokens: Tensor | None = None  # int64 (sources,)
    moe_balance: Tensor | None = None  # fp32 (): load of the busiest expert over the mean load, a mean over layers
    moe_entropy: Tensor | None = None  # fp32 (): of the routers' distributions, nats, a mean over tokens and layers
    moe_dropped: Tensor | None = None  # fp32 (): share of the assignments that capacity dropped


def init_state(params: dict[str, Tensor], opt_state: PyTree, extras: PyTree | None = None) -> TrainState:
    """The state before the first update, its counters on the parameters' device."""
    device = next(iter(params.values())).device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(step=zero, tokens=zero.clone(), params=params, opt_state=opt_state, extras=extras or {})


class _DonatedState(TrainState):
    """What a `TrainState` becomes once a step took its storage: touching it is an error."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        _refuse()

    def __repr__(self) -> str:
        return "<TrainState: donated to a train step>"

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def _refuse(*_: object) -> NoReturn:
    raise DonatedError(
        "this TrainState was given to a train step with donate=True, which reused its storage:"
        " go on with the state that the step returned, or build the step with donate=False"
    )


def is_donated(state: TrainState) -> bool:
    """Whether a step has taken this state's storage."""
    return type(state) is _DonatedState


def take(state: TrainState) -> TrainState:
    """Move the contents into a new state that owns them, and make any further use of the old one an error."""
    owned = evolve(state)
    for field in fields(TrainState):
        object.__setattr__(state, field.name, None)  # who still holds the old state holds no storage
    object.__setattr__(state, "__class__", _DonatedState)
    return owned


register_closed_node(_DonatedState, _refuse)
