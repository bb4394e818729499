"""Trees of tensors: round trips, and the algebra of a vector space."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.batch import Batch
from forge.pytree import (
    tree_add,
    tree_clone,
    tree_dot,
    tree_equal,
    tree_flatten_named,
    tree_leaves,
    tree_map,
    tree_norm,
    tree_scale,
    tree_stack,
    tree_structure,
    tree_sub,
    tree_unflatten_named,
    tree_unstack,
    tree_where,
    tree_zeros_like,
)
from forge.training.state import TrainState, init_state

leaves = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=4).map(torch.tensor)
names = st.sampled_from(["a.weight", "b.bias", "blocks.0.attn.wq.weight", "z"])
trees = st.recursive(
    leaves, lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3), max_leaves=6
)


def _state() -> TrainState:
    return init_state({"w": torch.ones(2, 3), "b": torch.zeros(3)}, {"mu": {"w": torch.ones(2, 3)}})


@given(tree=trees)
def test_names_lead_back_to_the_same_tree(tree):
    named = tree_flatten_named(tree)
    assert len(named) == len(tree_leaves(tree))
    assert tree_equal(tree_unflatten_named(tree, named), tree)


def test_a_state_is_named_by_its_fields_and_parameters():
    assert set(tree_flatten_named(_state())) == {"step", "tokens", "params/w", "params/b", "opt_state/mu/w"}


def test_a_missing_leaf_is_named():
    with pytest.raises(KeyError, match="params/b"):
        tree_unflatten_named(_state(), {n: x for n, x in tree_flatten_named(_state()).items() if n != "params/b"})


@given(tree=trees, factor=st.floats(-3, 3, width=32))
def test_trees_are_a_vector_space(tree, factor):
    torch.testing.assert_close(tree_leaves(tree_sub(tree_add(tree, tree), tree)), tree_leaves(tree), rtol=0, atol=0)
    torch.testing.assert_close(tree_leaves(tree_scale(tree, factor)), [leaf * factor for leaf in tree_leaves(tree)])
    assert tree_equal(tree_add(tree, tree_zeros_like(tree)), tree_map(lambda x: x + 0.0, tree))


@settings(deadline=None)
@given(tree=trees)
def test_the_norm_is_that_of_all_leaves_in_one_vector(tree):
    flat = torch.cat([leaf.flatten() for leaf in tree_leaves(tree)] or [torch.zeros(1)])
    torch.testing.assert_close(tree_norm(tree), torch.linalg.vector_norm(flat))
    if tree_leaves(tree):
        torch.testing.assert_close(tree_dot(tree, tree), flat.square().sum())


@given(tree=trees.filter(tree_leaves), count=st.integers(1, 4))
def test_unstacking_undoes_stacking(tree, count):
    many = [tree_scale(tree, float(k)) for k in range(count)]
    back = tree_unstack(tree_stack(many))
    assert len(back) == count and all(tree_equal(a, b) for a, b in zip(back, many, strict=True))


def test_where_takes_whole_trees():
    a, b = {"x": torch.ones(2)}, {"x": torch.zeros(2)}
    assert tree_equal(tree_where(torch.tensor(True), a, b), a) and tree_equal(tree_where(torch.tensor(False), a, b), b)


def test_a_clone_shares_no_storage():
    state = _state()
    clone = tree_clone(state)
    clone.params["w"].zero_()
    assert state.params["w"].all() and tree_structure(clone) == tree_structure(state)


def test_equality_tells_bits_dtypes_and_structures_apart_and_takes_nan_for_nan():
    nan = torch.tensor([float("nan"), 1.0])
    assert tree_equal([nan], [nan.clone()]) and not tree_equal([nan], [torch.tensor([0.0, 1.0])])
    assert not tree_equal([torch.ones(1)], [torch.ones(1).double()]) and not tree_equal(
        [torch.ones(1)], {"a": torch.ones(1)}
    )
    inf, zero = torch.tensor(torch.inf), torch.zeros(())
    assert not tree_equal(inf, torch.tensor(torch.finfo(torch.float32).max)) and not tree_equal(zero, -zero)
    assert not tree_equal(zero, torch.zeros(1))


def test_absent_fields_are_no_leaves_for_torch_func_either():
    batch = Batch(torch.zeros(2, 3, 4), torch.ones(2, 3, 4))
    assert len(tree_leaves(batch)) == 2
    out = torch.func.vmap(lambda b: b.micro(0).input_ids)(batch)
    assert out.shape == (2, 4)
