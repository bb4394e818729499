"""A batch splits into micro-batches, whether or not it carries document and source ids."""

from __future__ import annotations

import pytest
import torch

from forge.data import Batch
from forge.pytree import tree_equal


def _batch(extras: bool) -> Batch:
    ids = torch.arange(24).reshape(2, 3, 4)
    return Batch(ids, ids + 1, ids // 2, ids[..., 0]) if extras else Batch(ids, ids + 1)


@pytest.mark.parametrize("extras", [True, False])
def test_a_micro_batch_is_every_field_at_its_index(extras):
    batch = _batch(extras)
    micro = batch.micro(1)
    assert torch.equal(micro.input_ids, batch.input_ids[1]) and torch.equal(micro.labels, batch.labels[1])
    assert (micro.doc_ids is None, micro.source_ids is None) == (not extras, not extras)
    if extras:
        assert torch.equal(micro.doc_ids, batch.doc_ids[1]) and torch.equal(micro.source_ids, batch.source_ids[1])


@pytest.mark.parametrize("extras", [True, False])
def test_a_batch_on_its_own_device_is_unchanged_and_moves_whole_to_another(extras):
    batch = _batch(extras)
    assert tree_equal(batch.to("cpu"), batch)
    moved = batch.to("meta")
    assert moved.input_ids.device.type == moved.labels.device.type == "meta"
    assert moved.doc_ids is None if not extras else moved.doc_ids.device.type == "meta"
