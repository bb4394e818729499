"""A save in the background writes what the state was at the call, one at a time, and hides no error."""

from __future__ import annotations

import threading

import pytest
import torch
from attrs import evolve

import forge.checkpoint.save as save
from forge.checkpoint import AsyncSaver, list_checkpoints, load_checkpoint, prune_checkpoints, verify_checkpoint
from forge.config import JobConfig
from forge.errors import CheckpointError
from forge.pytree import tree_equal, tree_leaves, tree_map
from forge.training.state import init_state
from tests.devices import DEVICES


@pytest.fixture
def saver():
    saver = AsyncSaver()
    yield saver
    saver._pool.shutdown()


@pytest.fixture
def gate(monkeypatch):
    """Writing waits for it; `gate.started` is set once a write has begun."""
    gate, original = threading.Event(), save.save_file
    gate.started = threading.Event()

    def held(*args, **kwargs):
        gate.started.set()
        assert gate.wait(20)
        return original(*args, **kwargs)

    monkeypatch.setattr(save, "save_file", held)
    yield gate
    gate.set()


def _state(step, value=1.0):
    params = {"w": torch.full((3, 2), value), "b": torch.full((2,), -value, dtype=torch.bfloat16)}
    return evolve(init_state(params, {"mu": {"w": torch.full((3, 2), 2 * value)}}), step=torch.tensor(step))


def _load(path, state):
    return load_checkpoint(path, tree_map(lambda leaf: leaf.to("meta"), state))


@pytest.mark.parametrize("device", DEVICES)
def test_overwriting_the_state_after_the_call_does_not_change_what_is_written(saver, gate, tmp_path, device):
    state = tree_map(lambda leaf: leaf.to(device), _state(1))
    before = tree_map(lambda leaf: leaf.to("cpu", copy=True), state)
    path = saver.save(tmp_path, state, config=JobConfig(), notes={"n": 1})
    assert gate.started.wait(20) and not list_checkpoints(tmp_path)
    for leaf in tree_leaves(state):
        leaf.zero_()
    gate.set()
    saver.wait()
    assert tree_equal(_load(path, state), before)
    assert verify_checkpoint(path)["notes"] == {"n": 1}


def test_a_second_save_waits_for_the_first_and_both_are_whole(saver, gate, tmp_path):
    saver.save(tmp_path, _state(1, 1.0), config=JobConfig())
    assert gate.started.wait(20)
    release = threading.Timer(0.2, gate.set)
    release.start()
    second = saver.save(tmp_path, _state(2, 2.0), config=JobConfig())
    assert gate.is_set() and (tmp_path / "step_00000001").exists()
    saver.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000002"]
    assert tree_equal(_load(second, _state(2)), _state(2, 2.0))
    assert tree_equal(_load(tmp_path / "step_00000001", _state(1)), _state(1, 1.0))


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_an_error_surfaces_at_the_next_save_which_is_made_all_the_same(saver, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(save, "save_file", _full)
        saver.save(tmp_path, _state(1), config=JobConfig())
        saver._pool.submit(lambda: None).result()
    with pytest.raises(CheckpointError, match=r"step_00000001.*cannot be written: .*No space left"):
        saver.save(tmp_path, _state(2), config=JobConfig())
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.parametrize("last", ["wait", "close"])
def test_an_error_of_the_last_save_surfaces_once_when_it_is_waited_for(saver, tmp_path, monkeypatch, last):
    monkeypatch.setattr(save, "save_file", _full)
    saver.save(tmp_path, _state(1), config=JobConfig())
    with pytest.raises(CheckpointError, match="No space left"):
        getattr(saver, last)()
    saver.close()
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_are_removed_only_after_the_new_one_is_complete(saver, gate, tmp_path):
    gate.set()
    for step in (1, 2):
        saver.save(tmp_path, _state(step), config=JobConfig(), then=lambda path: prune_checkpoints(path.parent, 1))
    saver.wait()
    gate.clear()
    gate.started.clear()
    saver.save(tmp_path, _state(3), config=JobConfig(), then=lambda path: prune_checkpoints(path.parent, 1))
    assert gate.started.wait(20)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002"]
    gate.set()
    saver.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000003"]
