"""What every optimizer promises: the donated path is the pure one, a skipped update changes nothing, frozen is frozen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import SGD, AdamW, Lion, Muon, ScheduleFree
from forge.pytree import tree_clone, tree_equal, tree_flatten_named, tree_leaves, tree_stack, tree_unstack
from forge.training.optimizer import Optimizer, apply_update, build_optimizer, extend, parameter_roles
from forge.training.optimizer.core import bias_correction
from forge.training.optimizer.master import with_master_weights

SHAPES = {
    "embed.weight": (7, 4),
    "blocks.0.attn.wq.weight": (4, 4),
    "blocks.0.mlp.w_up.weight": (6, 4),
    "blocks.0.mlp.experts.w_up": (2, 4, 3),
    "blocks.0.mlp.router.weight": (2, 4),
    "blocks.0.attn_norm.weight": (4,),
    "head.weight": (7, 4),
}
CONFIGS = {
    "adamw": AdamW(),
    "muon": Muon(),
    "muon_plain_rms": Muon(nesterov=False, scaling="rms", weight_decay=0.0),
    "lion": Lion(),
    "schedule_free": ScheduleFree(warmup_steps=2, r=1.0),
    "sgd": SGD(weight_decay=0.1),
    "sgd_nesterov": SGD(nesterov=True),
}
TRUE, FALSE, ONE = torch.tensor(True), torch.tensor(False), torch.tensor(1.0)
LR = torch.tensor(0.02)
NAMES = [*CONFIGS, *(f"{name}+masters" for name in CONFIGS)]


def _tensors(seed: int, dtype=torch.float32, names=tuple(SHAPES)):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


def _optimizer(name: str) -> tuple[Optimizer, torch.dtype]:
    """The optimizer, and the dtype of the parameters that it is tried on."""
    params = _tensors(0)
    base, _, masters = name.partition("+")
    optimizer = build_optimizer(CONFIGS[base], parameter_roles(params))
    return (with_master_weights(optimizer), torch.bfloat16) if masters else (optimizer, torch.float32)


def _start(name: str, seed: int = 0, updates: int = 1):
    """An optimizer, and parameters and state that have seen some updates."""
    optimizer, dtype = _optimizer(name)
    params = _tensors(seed, dtype)
    state = optimizer.init(params)
    for update in range(updates):
        params, state = optimizer.update(_tensors(100 + update, dtype), state, params, LR)
    return optimizer, dtype, params, state


def _apply(optimizer, grads, state, params, *, lr=LR, scale=ONE, ok=TRUE, donate=False):
    return apply_update(optimizer, grads, state, params, lr=lr, scale=scale, ok=ok, donate=donate)


def _assert_close(left, right, rtol=2e-5, atol=2e-6):
    left, right = tree_flatten_named(left), tree_flatten_named(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert value.dtype == right[path].dtype, path
        near = {"rtol": 1e-2, "atol": 1e-2} if value.dtype == torch.bfloat16 else {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(value, right[path], **near, msg=lambda m, path=path: f"{path}: {m}")


def _bits(tree):
    """The same tree as integers: -0.0 is not 0.0, and NaN is NaN."""
    as_ints = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
    return [leaf.clone().view(as_ints[leaf.dtype]) for leaf in tree_leaves(tree)]


def _same_bits(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 999), scales=st.lists(st.sampled_from([1.0, 0.3, 1e-3]), min_size=1, max_size=5))
def test_donated_and_pure_updates_agree_to_rounding_with_clipping(name, seed, scales):
    optimizer, dtype, params, state = _start(name, seed)
    mine, my_state = tree_clone(params), tree_clone(state)
    for update, scale in enumerate(scales):
        grads = _tensors(seed + update, dtype)
        options = {"scale": torch.tensor(scale), "ok": torch.tensor(update != 2)}
        params, state = _apply(optimizer, grads, state, params, **options)
        mine, my_state = _apply(optimizer, tree_clone(grads), my_state, mine, **options, donate=True)
    _assert_close(mine, params)
    _assert_close(my_state, state)


@pytest.mark.parametrize("name", NAMES)
def test_donated_update_writes_into_the_storage_that_it_was_given(name):
    optimizer, dtype, params, state = _start(name)
    before = [leaf.data_ptr() for leaf in tree_leaves((params, state))]
    after = _apply(optimizer, _tensors(5, dtype), state, params, donate=True)
    assert [leaf.data_ptr() for leaf in tree_leaves(after)] == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_a_skipped_update_changes_no_bit_and_the_next_one_is_normal(name, donate, poison):
    optimizer, dtype, params, state = _start(name, updates=2)
    before = _bits((params, state))
    expected = _apply(optimizer, _tensors(6, dtype), tree_clone(state), tree_clone(params), donate=donate)
    grads = _tensors(5, dtype)
    for grad in grads.values():
        grad.view(-1)[0] = poison
    scale = torch.tensor(0.5 if poison == 1.0 else poison)
    params, state = _apply(optimizer, grads, state, params, scale=scale, ok=FALSE, donate=donate)
    assert _same_bits(_bits((params, state)), before)
    assert tree_equal(_apply(optimizer, _tensors(6, dtype), state, params, donate=donate), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_pure_update_leaves_its_arguments_untouched_and_repeats_bit_for_bit(name):
    optimizer, dtype, params, state = _start(name)
    grads = _tensors(5, dtype)
    before = _bits((grads, state, params))
    first = _apply(optimizer, grads, state, params, scale=torch.tensor(0.7))
    second = _apply(optimizer, grads, state, params, scale=torch.tensor(0.7))
    assert _same_bits(_bits((grads, state, params)), before)
    assert _same_bits(_bits(first), _bits(second))
    assert not _same_bits(_bits(first[0]), _bits(params))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_learning_rates_is_as_many_separate_runs(name):
    optimizer, dtype, params, state = _start(name)
    grads, lrs = _tensors(5, dtype), torch.tensor([0.0, 1e-3, 0.1])

    def update(state, params, lr):
        return _apply(optimizer, grads, state, params, lr=lr, scale=torch.tensor(0.5))

    stacked = tree_stack([(state, params)] * len(lrs))
    together = torch.func.vmap(update)(*stacked, lrs)
    for lr, run in zip(lrs, tree_unstack(together), strict=True):
        _assert_close(run, update(state, params, lr))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_frozen_parameter_keeps_its_bits_through_decay_momentum_and_clipping(name, donate):
    optimizer, dtype, params, state = _start(name, updates=2)
    frozen = ("blocks.0.attn.wq.weight", "blocks.0.mlp.experts.w_up", "embed.weight", "blocks.0.attn_norm.weight")

    def held():
        entries = [part[name] for part in state.values() for name in frozen if name in part]
        return _bits(([params[name] for name in frozen], entries))

    before = held()
    trained = [name for name in SHAPES if name not in frozen]
    for update in range(3):
        moving = params["blocks.0.mlp.w_up.weight"].clone()
        grads = _tensors(update, dtype, trained)
        params, state = _apply(optimizer, grads, state, params, scale=torch.tensor(0.1), donate=donate)
        assert _same_bits(held(), before)
        assert not torch.equal(params["blocks.0.mlp.w_up.weight"], moving)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_parameters_without_state_may_stand_beside_the_trained_ones(name, donate):
    optimizer, dtype = _optimizer(name)
    params = _tensors(0, dtype)
    trained = {key: params[key] for key in ("head.weight", "blocks.0.mlp.w_up.weight")}
    before = _bits({key: p for key, p in params.items() if key not in trained})
    state = optimizer.init(trained)
    assert {key for part in state.values() for key in part} == set(trained)
    params, state = _apply(optimizer, _tensors(1, dtype, tuple(trained)), state, params, donate=donate)
    assert _same_bits(_bits({key: p for key, p in params.items() if key not in trained}), before)
    assert optimizer.eval_params(params, state).keys() == params.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_no_gradients_at_all_is_no_update(name, donate):
    optimizer, _, params, state = _start(name)
    before = _bits((params, state))
    assert _same_bits(_bits(_apply(optimizer, {}, state, params, donate=donate)), before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_an_update_keeps_the_structure_shapes_and_dtypes_of_the_state(name, donate):
    optimizer, dtype = _optimizer(name)
    params = _tensors(0, dtype)
    state = optimizer.init(params)
    before = {path: (leaf.shape, leaf.dtype) for path, leaf in tree_flatten_named((params, state)).items()}
    after = _apply(optimizer, _tensors(1, dtype), state, params, donate=donate)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in tree_flatten_named(after).items()} == before


@pytest.mark.parametrize("name", NAMES)
def test_init_shares_no_storage_with_the_parameters(name):
    optimizer, dtype = _optimizer(name)
    params = _tensors(0, dtype)
    leaves = tree_leaves((params, optimizer.init(params)))
    assert len({leaf.data_ptr() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("donate", [False, True])
def test_optimizer_state_of_a_layer_unfrozen_late_starts_then(name, donate):
    optimizer, dtype = _optimizer(name)
    params = _tensors(0, dtype)
    early = ("head.weight", "blocks.0.mlp.w_up.weight")
    late = "blocks.0.attn.wq.weight"
    state = optimizer.init({key: params[key] for key in early})
    for update in range(3):
        params, state = _apply(optimizer, _tensors(update, dtype, early), state, params, donate=donate)
    grown = extend(optimizer, state, {key: params[key] for key in (*early, late)})
    for key, part in state.items():
        assert all(grown[key][name] is part[name] for name in part)
    # From here on the late parameter fares as it would alone, from a fresh state.
    alone, alone_state = {late: params[late].clone()}, optimizer.init({late: params[late].clone()})
    for update in range(3):
        grads = _tensors(10 + update, dtype, (*early, late))
        alone, alone_state = _apply(optimizer, {late: grads[late].clone()}, alone_state, alone, donate=donate)
        params, grown = _apply(optimizer, grads, grown, params, donate=donate)
    _assert_close({late: params[late]}, alone)
    _assert_close(
        {key: {late: part[late]} for key, part in grown.items() if late in part},
        {key: part for key, part in alone_state.items() if part},
    )


def test_extending_by_nothing_gives_the_state_back():
    optimizer, _, params, state = _start("muon")
    assert tree_equal(extend(optimizer, state, params), state)


def test_a_users_own_optimizer_needs_init_and_update_only():
    def update(grads, opt_state, params, lr):
        return {name: p - lr * grads[name] if name in grads else p for name, p in params.items()}, opt_state

    optimizer = Optimizer(lambda params: {}, update)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    for donate in (False, True):
        after, _ = _apply(optimizer, grads, {}, params, lr=torch.tensor(0.5), scale=torch.tensor(0.5), donate=donate)
        assert after["w"].tolist() == [0.75, 0.75]
    assert optimizer.eval_params(params, {}) is params


@pytest.mark.parametrize("donate", [False, True])
def test_clipping_a_bf16_gradient_is_done_in_fp32(donate):
    optimizer = with_master_weights(build_optimizer(SGD(momentum=0.0), {"w": "vector"}))
    params = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    grads, scale = {"w": torch.ones(1, dtype=torch.bfloat16)}, torch.tensor(0.3)  # 0.3 is 0.30078125 in bf16
    _, state = _apply(optimizer, grads, optimizer.init(params), params, lr=ONE, scale=scale, donate=donate)
    assert state["master"]["w"].item() == pytest.approx(-0.3, rel=1e-6)


@settings(deadline=None)
@given(beta=st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.999, 0.999999]), count=st.integers(1, 100_000))
def test_bias_correction_is_exact_to_fp32(beta, count):
    assert bias_correction(beta, torch.tensor(float(count))).item() == pytest.approx(1 - beta**count, rel=1e-6)


@pytest.mark.parametrize("config", [AdamW(), ScheduleFree()], ids=lambda config: config.name)
def test_updates_can_be_differentiated_where_a_second_moment_is_zero(config):
    params = {"embed.weight": torch.ones(3, 2), "blocks.0.mlp.w_up.weight": torch.ones(2, 2)}
    optimizer = build_optimizer(config, parameter_roles(params))
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    grads["embed.weight"][0] = 1.0  # the other rows' tokens did not come

    def after_two(lr):
        new, state = dict(params), optimizer.init(params)
        for _ in range(2):
            new, state = optimizer.update({name: g * new[name] for name, g in grads.items()}, state, new, lr)
        return sum(p.sum() for p in new.values())

    assert torch.func.grad(after_two)(torch.tensor(0.1)).isfinite()
