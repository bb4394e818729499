"""The values that flow through a training step."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from attrs import evolve, frozen
from torch import Tensor

from forge.errors import DonatedError
from forge.pytree import PyTree, register_node

IGNORE = -100
"""Label of a position that is not a target."""


@register_node
@frozen
class Batch:
    """All the tokens of one update on this rank: A micro-batches of B sequences of S tokens."""

    input_ids: Tensor  # int64 (A, B, S)
    labels: Tensor  # int64 (A, B, S), IGNORE = not a target
    doc_ids: Tensor | None = None  # int64 (A, B, S): tokens attend only within their document
    source_ids: Tensor | None = None  # int64 (A, B): which data source a sequence came from

    def micro(self, index: int) -> Batch:
        """Micro-batch `index`: the same fields without the leading dimension."""
        return Batch(*(None if x is None else x[index] for x in (self.input_ids, self.labels, self.doc_ids, self.source_ids)))

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on a device; itself where it is there already."""
        fields = (self.input_ids, self.labels, self.doc_ids, self.source_ids)
        return Batch(*(None if x is None else x.to(device, non_blocking=non_blocking) for x in fields))


@register_node
@frozen
class TrainState:
    """Everything a training run is, and all that a checkpoint holds."""

    step: Tensor  # int64 (): batches consumed; the schedule and the data position read it
    tokens: Tensor  # int64 (): target tokens trained on
    params: dict[str, Tensor]  # by the module's fully-qualified names
    opt_state: PyTree
    extras: PyTree  # what learns without a gradient: router biases, spike window, EMA


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
    skipped: Tensor  # bool (): the update was not made (non-finite gradient, or no target)
    source_loss: Tensor | None = None  # fp32 (sources,): summed cross entropy by source
    source_tokens: Tensor | None = None  # int64 (sources,)


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


def take(state: TrainState) -> TrainState:
    """Move the contents into a new state that owns them, and make any further use of the old one an error."""
    owned = evolve(state)
    object.__setattr__(state, "__class__", _DonatedState)
    return owned


def _register_donated() -> None:
    import optree

    from forge.pytree import NAMESPACE, torch_pytree

    optree.register_pytree_node(_DonatedState, _refuse, _refuse, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(_DonatedState, _refuse, _refuse)


_register_donated()
