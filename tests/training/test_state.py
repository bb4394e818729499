"""A state that was given away cannot be used by mistake, and one that was not is left alone."""

from __future__ import annotations

import copy
import weakref

import optree
import pytest
import torch
from attrs import evolve

from forge.errors import DonatedError
from forge.pytree import tree_equal, tree_map
from forge.training.state import TrainState, init_state, is_donated, take


def _state() -> TrainState:
    params = {"a.weight": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    return init_state(params, {"mu": {"a.weight": torch.zeros(2, 3)}}, {"router_bias": {"0": torch.zeros(4)}})


def test_counters_start_at_zero_apart_from_each_other():
    state = _state()
    assert (int(state.step), int(state.tokens)) == (0, 0)
    assert state.step.dtype == state.tokens.dtype == torch.int64 and state.step.shape == ()
    assert state.step.data_ptr() != state.tokens.data_ptr()
    assert init_state({"a": torch.ones(1, device="meta")}, {}).step.device.type == "meta"


def test_a_state_is_a_tree_of_its_tensors():
    state = _state()
    assert len(optree.tree_leaves(state, namespace="forge")) == 6
    assert tree_equal(tree_map(torch.clone, state), state)
    assert isinstance(tree_map(torch.clone, state), TrainState)


def test_who_holds_a_state_that_was_taken_holds_no_storage():
    state = _state()
    storage = weakref.ref(state.params["a.weight"])
    owned = take(state)
    assert storage() is not None
    del owned
    assert storage() is None and is_donated(state)


def test_taking_moves_the_contents_and_closes_the_old_state():
    state = _state()
    step, params = state.step, state.params
    owned = take(state)
    assert type(owned) is TrainState and owned.step is step and owned.params is params
    assert is_donated(state) and not is_donated(owned)


USES = {
    "read": lambda state: state.step,
    "read params": lambda state: state.params,
    "map": lambda state: tree_map(torch.clone, state),
    "flatten": lambda state: optree.tree_leaves(state, namespace="forge"),
    "evolve": lambda state: evolve(state, step=torch.zeros(())),
    "take again": take,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_a_donated_state_says_what_happened(use):
    state = _state()
    take(state)
    with pytest.raises(DonatedError, match="go on with the state that the step returned"):
        USES[use](state)


def test_a_donated_state_can_still_be_printed_and_compared():
    state = _state()
    take(state)
    assert "donated" in repr(state) and state == state and state != _state()


def test_a_copy_made_before_stays_usable():
    state = _state()
    kept = copy.copy(state)
    take(state)
    assert int(kept.step) == 0 and not is_donated(kept)


def test_a_state_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        _state().step = torch.ones(())
