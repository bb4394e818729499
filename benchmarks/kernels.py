"""The kernels of a step without what is between them: the floor of a step that torch's own kernels allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import batches, forge_step
from benchmarks.regimes import Device, Regime, job_config, timed_precision
from benchmarks.step import alternate, matrix_product
from forge.metrics import count_flops_per_token, count_parameters

PRODUCTS, ATTENTION = "products", "attention"
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_INTO = {torch.ops.aten.mm.default: torch.ops.aten.mm.out, torch.ops.aten.bmm.default: torch.ops.aten.bmm.out}
"""A product that makes its result, and the same into memory that is there already."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")


class KernelRecorder(TorchDispatchMode):
    """Matrix products and attention, forward and backward, in the order of their calls, with the tensors they took."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = {PRODUCTS: [], ATTENTION: []}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _PRODUCTS:
            into = _INTO.get(func)
            self.calls[PRODUCTS].append((into, args, {"out": result}) if into else (func, args, kwargs))
        elif "attention" in name:
            self.calls[ATTENTION].append((func, args, kwargs))
        return result


def record_step(regime: Regime, device: Device) -> dict[str, list[Call]]:
    """The kernels of one eager forge step, by kind; its second, when all state is there."""
    take = forge_step(job_config(regime, device, timed_precision(device)), batches(regime, device))
    take()
    with KernelRecorder() as recorder:
        take()
    return recorder.calls


def again(calls: Sequence[Call]) -> Callable[[], None]:
    """A turn that makes the calls on the tensors that they took, whatever is in them by now."""

    @torch.no_grad()
    def turn() -> None:
        for func, args, kwargs in calls:
            func(*args, **kwargs)

    return turn


@frozen
class Floor:
    """Seconds of a regime's step and of what it cannot do without, all at the median of turns taken in one run."""

    step: float
    products: float  # its matrix products alone, in the same shapes and into memory that is there already
    attention: float  # torch's attention kernel alone
    optimizer: float  # the least bytes of AdamW at the memory's bandwidth
    flops: float  # the model's FLOPs at the rate of a large matrix product

    @property
    def kernels(self) -> float:
        """The floor that torch's kernels allow."""
        return self.products + self.attention + self.optimizer


def measure_floor(regime: Regime, device: Device, repeats: int, bytes_per_param: int, bandwidth: float) -> Floor:
    """Time an eager step of forge and its kernels in turns.

    Args:
        bytes_per_param: that the optimizer moves at least.
        bandwidth: bytes a second.
    """
    config = job_config(regime, device, timed_precision(device))
    take, (product, flops) = forge_step(config, batches(regime, device)), matrix_product(device)
    recorded = {kind: again(calls) for kind, calls in record_step(regime, device).items()}
    taken = alternate({"step": take, **recorded, "gemm": product}, repeats, device, lambda line: None)
    seconds = {name: median(turns) for name, turns in taken.items()}
    return Floor(
        seconds["step"],
        seconds[PRODUCTS],
        seconds[ATTENTION],
        optimizer=count_parameters(config.model).total * bytes_per_param / bandwidth,
        flops=count_flops_per_token(config.model, regime.seq_len) * regime.tokens * seconds["gemm"] / flops,
    )
