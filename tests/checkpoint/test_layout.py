"""Chunks in files and parts on ranks: any tiling is cut into any other, and what is not a tiling is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.checkpoint.layout import (
    Box,
    Part,
    assign,
    check_tiling,
    layout_from_json,
    layout_to_json,
)
from forge.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def _cut(data, shape):
    """A random grid of boxes that tile a tensor; some without elements, as uneven sharding leaves them."""
    boxes = [Box((), ())]
    for length in shape:
        cuts = [0, *sorted(data.draw(st.lists(st.integers(0, length), max_size=3))), length]
        boxes = [Box((*b.offset, a), (*b.shape, z - a)) for b in boxes for a, z in pairwise(cuts)]
    return boxes


def _at(box, tensor):
    return tensor[box.inside(Box((0,) * tensor.dim(), tuple(tensor.shape)))]


@settings(deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_every_part_of_one_tiling_is_assembled_from_the_chunks_of_another(data, shape):
    whole = torch.randn(shape)
    chunks = [(box, _at(box, whole).clone()) for box in _cut(data, shape)]
    for mine in _cut(data, shape):
        shared = [(box.meet(mine), box, held) for box, held in chunks if box.meet(mine).numel]
        check_tiling("leaf", mine, [box for box, _, _ in shared])
        part = torch.full(mine.shape, torch.nan)
        for both, box, held in shared:
            part[both.inside(mine)] = held[both.inside(box)]
        assert torch.equal(part, _at(mine, whole))


@settings(deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_a_chunk_too_few_or_too_many_is_refused_with_the_leaf(data, shape):
    target = Box((0,) * len(shape), shape)
    boxes = [box for box in _cut(data, shape) if box.numel]
    picked = data.draw(st.sampled_from(boxes))
    with pytest.raises(CheckpointError, match=r"leaf: .*leave a gap"):
        check_tiling("leaf", target, [box for box in boxes if box != picked])
    with pytest.raises(CheckpointError, match=r"leaf: .*overlap"):
        check_tiling("leaf", target, [*boxes, picked])


@settings(deadline=None)
@given(data=st.data(), shape=SHAPES, copies=st.integers(1, 3))
def test_each_chunk_is_written_by_one_rank_the_lowest_that_holds_it(data, shape, copies):
    boxes = _cut(data, shape)
    held = [{"params/w": Part(shape, "float32", box)} for _ in range(copies) for box in boxes]
    layout, owned = assign(held)
    assert {box for _, box in layout["params/w"].chunks} == {box for box in boxes if box.numel}
    for file, box in layout["params/w"].chunks:
        rank = next(rank for rank, parts in enumerate(held) if parts["params/w"].box == box)
        assert owned[rank] == ["params/w"]
        assert file == ("params.safetensors" if len(held) == 1 else f"params.{rank:05d}.safetensors")
    assert sum(map(len, owned)) == len(layout["params/w"].chunks)
    assert layout_from_json(layout_to_json(layout)) == layout


def test_stages_hold_different_leaves_and_a_tied_one_is_written_once():
    part = Part((2,), "float32", Box((0,), (2,)))
    layout, owned = assign([{"params/tied": part, "params/a": part}, {"params/b": part, "params/tied": part}])
    assert owned == [["params/tied", "params/a"], ["params/b"]]
    assert {name: leaf.chunks[0][0] for name, leaf in layout.items()} == {
        "params/tied": "params.00000.safetensors",
        "params/a": "params.00000.safetensors",
        "params/b": "params.00001.safetensors",
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Part((4,), "float32", Box((0,), (2,))), "gap"),
        (Part((4,), "float32", Box((1,), (3,))), "overlap"),
        (Part((4,), "bfloat16", Box((2,), (2,))), r"params/w is \(4,\) float32 on one rank, \(4,\) bfloat16 on rank 1"),
        (Part((5,), "float32", Box((2,), (3,))), r"\(5,\) float32 on rank 1"),
    ],
)
def test_ranks_whose_parts_do_not_make_one_leaf_are_refused_before_anything_is_written(other, message):
    with pytest.raises(CheckpointError, match=f"params/w.*{message}|{message}"):
        assign([{"params/w": Part((4,), "float32", Box((0,), (2,)))}, {"params/w": other}])


@pytest.mark.parametrize("text", ["[]", "{", '{"w": 3}', '{"w": {"shape": [2], "dtype": "float32"}}',
                                  '{"w": {"shape": [-2], "dtype": "float32", "chunks": []}}',
                                  '{"w": {"shape": [2], "dtype": "float32", "chunks": [["f", [0, 0], [2]]]}}'])  # fmt: skip
def test_what_is_no_layout_is_a_value_error(text):
    with pytest.raises(ValueError):
        layout_from_json(text)
