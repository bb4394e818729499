"""A collective check that the ranks of a job still make one run: what must be equal on them is, to the bit.

A device that computes wrongly, or a replica whose memory changed, fails nothing: the loss only gets worse, and the
checkpoints with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from forge.distributed.mesh import DIMS
from forge.distributed.shards import local_data
from forge.errors import RankError
from forge.resilience.reports import name_ranks, own_name
from forge.training.runtime import Runtime
from forge.training.state import StepResult, TrainState

HealthCheck = Callable[[int, TrainState, StepResult, bool], None]
"""Takes the updates made, the state after them, the last result, and whether to check at any step."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@frozen
class Fingerprint:
    """What must be equal on all ranks, and on those with one place in the model; integers, so equal is to the bit."""

    step: int
    tokens: int
    loss: int  # its 32 bits
    grad_norm: int  # its 32 bits
    place: int  # which part of the model the rank holds: ranks of one place are replicas
    checksum: int  # of the parameters of this part


@frozen
class Difference:
    """Ranks that have something else than they must."""

    ranks: Sequence[int]
    right: Sequence[int]  # the ranks that they must agree with: most of them or, where no more agree, the first
    what: str
    value: str  # on the first of `ranks`
    expected: str  # on `right`


def build_health_check(runtime: Runtime, interval: int) -> HealthCheck:
    """The check for every `interval` updates, and before a checkpoint; 0 = never. All ranks call it after each update.

    Where it does not run, nothing waits for the device. Where it does, each rank reads its parameters once, and six
    numbers a rank go over host memory.

    Raises:
        RankError: on all ranks; names those that differ.
    """
    mesh = runtime.mesh
    if mesh is None or not interval:
        return lambda step, state, result, due: None
    place = mesh.place(dim for dim in DIMS if dim != "dp_replicate")

    def check(step: int, state: TrainState, result: StepResult, due: bool) -> None:
        if not due and step % interval:
            return
        own = torch.stack(_numbers(state, result, place)).cpu()
        rows = [torch.empty_like(own) for _ in range(runtime.world_size)]
        dist.all_gather(rows, own, group=runtime.control)
        difference = find_difference([Fingerprint(*row.tolist()) for row in rows])
        if difference is not None:
            names: list[str] = [""] * runtime.world_size
            dist.all_gather_object(names, own_name(), group=runtime.control)
            raise RankError(_line(step, difference, names))

    return check


def find_difference(prints: Sequence[Fingerprint]) -> Difference | None:
    """The first thing in which ranks differ that must agree; None where there is none. By rank, the same on each."""
    everyone = range(len(prints))
    for name in ("step", "tokens", "loss", "grad_norm"):
        found = _compare(everyone, [getattr(each, name) for each in prints], name)
        if found is not None:
            return found
    sums = [each.checksum for each in prints]
    for place in sorted({each.place for each in prints}):
        found = _compare([rank for rank in everyone if prints[rank].place == place], sums, "checksum")
        if found is not None:
            return found
    return None


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """An int64 () that any one changed bit of the parts here changes, and a part in the place of another."""
    sums = [part.view(_BITS[part.element_size()]).sum(dtype=torch.int64) for part in map(local_data, tensors)]
    total = torch.stack(sums)
    return (total * torch.arange(1, 2 * len(sums), 2, device=total.device)).sum()  # odd: no bit is lost


def _numbers(state: TrainState, result: StepResult, place: int) -> list[Tensor]:
    """The fields of a `Fingerprint`, on the device."""
    with torch.no_grad():
        held = checksum([state.params[name] for name in sorted(state.params)])
        loss, norm = _bits(result.loss), _bits(result.grad_norm)
        counters = [state.step.long(), state.tokens.long()]
        return [*counters, loss, norm, torch.full_like(held, place), held]


def _bits(number: Tensor) -> Tensor:
    """The bits of a number as fp32; one NaN is as good as another."""
    number = number.detach().float()
    return torch.where(number.isnan(), math.nan, number).view(torch.int32).long()


def _compare(ranks: Sequence[int], values: Sequence[int], name: str) -> Difference | None:
    common, _ = Counter(values[rank] for rank in ranks).most_common(1)[0]  # of equally many, the first met
    odd = [rank for rank in ranks if values[rank] != common]
    if not odd:
        return None
    right = [rank for rank in ranks if values[rank] == common]
    return Difference(odd, right, name, _shown(name, values[odd[0]]), _shown(name, common))


def _shown(name: str, value: int) -> str:
    if name in ("loss", "grad_norm"):
        return repr(torch.tensor(value, dtype=torch.int32).view(torch.float32).item())
    return f"{value % (1 << 64):016x}" if name == "checksum" else str(value)


def _line(step: int, difference: Difference, names: Sequence[str]) -> str:
    odd, right = (name_ranks(ranks, names[ranks[0]]) for ranks in (difference.ranks, difference.right))
    return (
        f"health check after update {step}: {difference.what} is {difference.value} on {odd} and {difference.expected}"
        f" on {right}, which must be the same: a device or its memory may be at fault; go on from the newest checkpoint"
        " without that machine (distributed.health_check_interval = 0 checks nothing)"
    )
