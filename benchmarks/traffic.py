"""What one rank says to others, counted while it runs: every collective and message that torch dispatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.training.plan_traffic import Kind, ring_bytes

_KINDS: dict[str, Kind] = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "send": "point-to-point",
}
_SILENT = {"recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier"}
"""Operators that send nothing of their own: a message counts where it is sent."""


class TrafficCounter(TorchDispatchMode):
    """Bytes that this rank sends, by kind, while it is active; backward passes included.

    Collectives count by `ring_bytes` of the buffer that torch hands over, padding included, and messages by their size.
    The functional collectives of DTensor, the plain ones of FSDP2 and forge, and those of pipelines all come by here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor says what it sends by operators on its parts, which come by here
        space, name = func.namespace, func.overloadpacket.__name__
        if space in ("c10d", "_c10d_functional") and name not in _SILENT:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name not in _KINDS:
            raise NotImplementedError(f"traffic of {name} is not counted")
        kind, group = _KINDS[name], _group(args)
        if kind == "all-to-all":
            self.sent[kind] += _sent_to_others(name, args, group)
        else:
            self.sent[kind] += ring_bytes(kind, _whole(name, args, group), group.size())


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # a ReduceOp
                continue
        if isinstance(arg, dist.ProcessGroup):
            return arg
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))


def _whole(name: str, args: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Bytes of what all ranks have together after an all-gather, or each before a reduction."""
    if name.startswith("all_gather_into_tensor"):
        return _bytes(args[0]) * group.size()
    second = name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
    return _bytes(args[1] if second else args[0])


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_bytes(tensor) for tensor in tensors)


def _sent_to_others(name: str, args: Sequence[Any], group: dist.ProcessGroup) -> float:
    given, splits = (args[1], args[4]) if name == "alltoall_base_" else (args[0], args[2])
    if not splits:
        return ring_bytes("all-to-all", given.nbytes, group.size())
    rows = sum(rows for rank, rows in enumerate(splits) if rank != group.rank())
    return rows * given.nbytes / max(1, given.shape[0])
