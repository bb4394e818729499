"""Which file holds which part of which leaf: how parts that ranks hold become chunks in files, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.distributed.shards import local_data, local_slices
from forge.errors import CheckpointError
from forge.files import parse_json

PARAMS = "params.safetensors"
REST = "state.safetensors"
PARAMS_PREFIX = "params/"


@frozen
class Box:
    """A rectangular part of a tensor; of a scalar, `((), ())`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box:
        """What both contain; without elements where they are apart."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def inside(self, other: Box) -> tuple[slice, ...]:
        """Where in a tensor that holds `other` this one lies."""
        starts = [mine - origin for mine, origin in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def _ends(self) -> list[int]:
        return [start + length for start, length in zip(self.offset, self.shape, strict=True)]


@frozen
class Part:
    """What one rank holds of a leaf."""

    shape: tuple[int, ...]  # of the whole leaf
    dtype: str  # torch's name for it
    box: Box


@frozen
class Leaf:
    """A leaf in a checkpoint: chunks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[str, Box], ...]  # (file, what it holds)

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


Layout = dict[str, Leaf]
"""By path in the state, `params/blocks.0.attn.wq.weight`."""


def part_of(name: str, leaf: Tensor) -> Part:
    """What this rank holds of a leaf.

    Raises:
        CheckpointError: a part that is not one rectangle, as of some uneven cuts by two mesh dimensions.
    """
    shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
    if not isinstance(leaf, DTensor):
        return Part(shape, dtype, Box((0,) * leaf.dim(), shape))
    slices, held = local_slices(leaf), tuple(local_data(leaf).shape)
    box = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
    if box.shape != held:
        raise CheckpointError(f"{name}: {leaf.placements} on {shape} leaves {held} here, not {box.shape}")
    return Part(shape, dtype, box)


def assign(held: Sequence[Mapping[str, Part]]) -> tuple[Layout, list[list[str]]]:
    """Give every chunk to the lowest rank that holds it, so that copies are written once.

    Args:
        held: by rank, what it holds of each leaf; pipeline stages hold different leaves.

    Returns:
        The layout, and by rank the leaves of which it writes its part.

    Raises:
        CheckpointError: the ranks disagree about a leaf, or their parts do not tile it.
    """
    layout: Layout = {}
    owners: dict[str, dict[Box, int]] = {}
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            leaf = layout.setdefault(name, Leaf(part.shape, part.dtype, ()))
            if (leaf.shape, leaf.dtype) != (part.shape, part.dtype):
                raise CheckpointError(f"{name} is {leaf} on one rank, {part.shape} {part.dtype} on rank {rank}")
            if part.box.numel:
                owners.setdefault(name, {}).setdefault(part.box, rank)
    owned: list[list[str]] = [[] for _ in held]
    for name, leaf in layout.items():
        boxes = owners.get(name, {})
        check_tiling(name, Box((0,) * len(leaf.shape), leaf.shape), list(boxes))
        chunks = tuple((file_name(name, rank, len(held)), box) for box, rank in boxes.items())
        layout[name] = evolve(leaf, chunks=chunks)
        for rank in boxes.values():
            owned[rank].append(name)
    return layout, owned


def file_name(leaf: str, rank: int, ranks: int) -> str:
    """The file into which a rank writes its part of a leaf; one process alone has no rank in its names."""
    name = PARAMS if leaf.startswith(PARAMS_PREFIX) else REST
    return name if ranks == 1 else name.replace(".", f".{rank:05d}.")


def key_in_file(leaf: str) -> str:
    """The name of a leaf within its file: that of the module for parameters."""
    return leaf.removeprefix(PARAMS_PREFIX)


def check_tiling(name: str, target: Box, boxes: Sequence[Box]) -> None:
    """Refuse boxes that do not contain every element of `target` exactly once; none may reach beyond it.

    Raises:
        CheckpointError: names the leaf.
    """
    if not target.numel or list(boxes) == [target]:
        return
    edges = []
    for dim in range(len(target.shape)):
        starts = [box.offset[dim] for box in (target, *boxes)]
        ends = [box.offset[dim] + box.shape[dim] for box in (target, *boxes)]
        edges.append({place: index for index, place in enumerate(sorted({*starts, *ends}))})
    times = torch.zeros([len(places) - 1 for places in edges], dtype=torch.int32)
    for box in boxes:
        cells = zip(edges, box.offset, box.shape, strict=True)
        times[tuple(slice(places[start], places[start + length]) for places, start, length in cells)] += 1
    if not bool((times == 1).all()):
        problem = "overlap" if bool((times > 1).any()) else "leave a gap"
        raise CheckpointError(f"{name}: the {len(boxes)} chunks of {target.shape} at {target.offset} {problem}")


def layout_to_json(layout: Layout) -> str:
    """One line for each leaf."""
    lines = []
    for name, leaf in layout.items():
        chunks = [[file, box.offset, box.shape] for file, box in leaf.chunks]
        lines.append(f"{json.dumps(name)}: {json.dumps({'shape': leaf.shape, 'dtype': leaf.dtype, 'chunks': chunks})}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def layout_from_json(text: str) -> Layout:
    """Inverse of `layout_to_json`.

    Raises:
        ValueError: the text is something else.
    """
    try:
        return {name: _leaf(entry) for name, entry in parse_json(text).items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a layout: {error!r}") from None


def _leaf(entry: Mapping[str, Any]) -> Leaf:
    shape = _sizes(entry["shape"], len(entry["shape"]))
    chunks = [(str(file), Box(_sizes(at, len(shape)), _sizes(size, len(shape)))) for file, at, size in entry["chunks"]]
    return Leaf(shape, str(entry["dtype"]), tuple(chunks))


def _sizes(values: Sequence[Any], dims: int) -> tuple[int, ...]:
    if len(values) != dims or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"not a layout: {values} are not {dims} sizes")
    return tuple(values)
