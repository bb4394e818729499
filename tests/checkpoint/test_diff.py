"""What a diff says of two tensors is what they are; layouts and file names do not matter."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from forge.checkpoint import diff as diff_module
from forge.checkpoint import diff_checkpoints, format_diff, save_checkpoint
from forge.config import JobConfig
from forge.errors import CheckpointError
from forge.pytree import same_bits
from forge.training.state import init_state


def _save(root, params, step=1):
    state = evolve(init_state(params, {"mu": {"w": torch.ones(2, 2)}}), step=torch.tensor(step))
    return save_checkpoint(root, state, config=JobConfig())


def _differing(a, b):
    return {found.name: found for found in diff_checkpoints(a, b) if not found.same_bits}


def test_equal_checkpoints_differ_in_nothing(tmp_path):
    paths = [_save(tmp_path / name, {"w": torch.tensor([1.0, math.nan, -0.0])}) for name in "ab"]
    assert [found.name for found in diff_checkpoints(*paths)] == ["params/w", "opt_state/mu/w", "step", "tokens"]
    assert _differing(*paths) == {}


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_differences_norms_and_nans_are_those_of_the_tensors(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(diff_module, "_CHUNK", chunk)
    a = _save(tmp_path / "a", {"w": torch.tensor([3.0, 4.0, 0.0, math.nan]), "h": torch.tensor([1.0])})
    b = _save(tmp_path / "b", {"w": torch.tensor([3.0, 4.5, -0.25, math.nan]), "h": torch.tensor([math.inf])}, step=3)
    found = _differing(a, b)
    assert found.keys() == {"params/w", "params/h", "step"}
    w = found["params/w"]
    assert w.max_abs == 0.5 and w.nans == (1, 1) and math.isnan(w.norms[0])
    assert w.relative == pytest.approx(math.hypot(0.5, 0.25) / 5)
    assert found["params/h"].max_abs == math.inf and found["params/h"].norms == (1.0, math.inf)
    assert found["step"].max_abs == 2 and "step" in format_diff(found["step"])


def test_the_smallest_difference_is_seen(tmp_path):
    value = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    flipped = (value.view(torch.int16) ^ torch.tensor([0, 1], dtype=torch.int16)).view(torch.bfloat16)
    found = _differing(_save(tmp_path / "a", {"w": value}), _save(tmp_path / "b", {"w": flipped}))
    assert found.keys() == {"params/w"} and found["params/w"].max_abs == 2**-6


def test_what_is_in_one_only_or_of_another_shape_is_said(tmp_path):
    a = _save(tmp_path / "a", {"w": torch.ones(2), "only_a": torch.ones(1)})
    b = _save(tmp_path / "b", {"w": torch.ones(3), "only_b": torch.ones(1)})
    lines = [format_diff(found) for found in _differing(a, b).values()]
    assert "params/w: (2,) float32 in A, (3,) float32 in B" in lines
    assert "params/only_a: (1,) float32 in A, absent in B" in lines
    assert "params/only_b: absent in A, (1,) float32 in B" in lines


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        list(diff_checkpoints(tmp_path, tmp_path))


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=5), st.lists(st.floats(width=32), max_size=5))
def test_same_bits_is_equality_of_the_bytes(left, right):
    a, b = torch.tensor(left), torch.tensor(right[: len(left)] + left[len(right) :])
    assert same_bits(a, a.clone())
    assert same_bits(a, b) == (a.numpy().tobytes() == b.numpy().tobytes())


def test_zeros_of_two_signs_and_scalars_are_told_apart():
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert same_bits(torch.tensor(True), torch.tensor(True))
