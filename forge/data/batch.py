"""The batch: all the tokens of one update."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from forge.pytree import register_node, tree_map

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
        return tree_map(lambda x: x[index], self)

    def pin_memory(self) -> Batch:
        """The batch in pinned memory, from which a copy to a CUDA device waits for nothing."""
        return tree_map(lambda x: x.pin_memory(), self)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch on a device; itself where it is there already. To the CPU it waits, since nothing later would."""
        ahead = non_blocking and torch.device(device).type != "cpu"
        return tree_map(lambda x: x.to(device, non_blocking=ahead), self)
