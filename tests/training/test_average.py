"""The average of the parameters is the weighted mean that it says it is, in every layout of the step."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import JobConfig, NoSchedule, ScheduleFree, TrainConfig
from forge.errors import ConfigError
from forge.pytree import tree_clone, tree_equal, tree_stack, tree_unstack
from forge.training.average import average, averaged, init_ema
from forge.training.state import init_state
from tests.training.test_step import PER_SAMPLE, _batch, _build, _config

OK = torch.tensor(True)


def _series(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"a": torch.randn(3, 2, generator=generator), "b": torch.randn(4, generator=generator)} for _ in range(count)
    ]


@settings(deadline=None, max_examples=40)
@given(decay=st.sampled_from([0.0, 0.5, 0.9, 0.999]), good=st.lists(st.booleans(), max_size=9), donate=st.booleans())
def test_the_average_weighs_each_update_by_decay_to_the_power_of_its_age(decay, good, donate):
    params = _series(len(good) + 1)
    extras = init_ema(TrainConfig(ema_decay=decay), params[0])
    for values, made in zip(params[1:], good, strict=True):
        extras = average(extras, values, torch.tensor(made), decay, donate=donate)
    made = [values for values, was_made in zip(params[1:], good, strict=True) if was_made]
    found = averaged(params[-1], extras)
    if not made:
        assert tree_equal(found, params[-1])
        return
    weights = [decay**age for age in range(len(made))][::-1]
    for name in found:
        mean = sum(w * values[name] for w, values in zip(weights, made, strict=True)) / sum(weights)
        torch.testing.assert_close(found[name], mean, rtol=1e-4, atol=1e-5)


def test_an_update_that_is_not_made_moves_no_bit_and_the_pure_form_leaves_its_argument():
    (before, after), decay = _series(2), 0.9
    extras = average(init_ema(TrainConfig(ema_decay=decay), before), before, OK, decay)
    kept = tree_clone(extras)
    moved = average(extras, after, OK, decay)
    assert tree_equal(extras, kept) and not tree_equal(moved, kept)
    assert tree_equal(average(extras, after, ~OK, decay, donate=True), kept)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999, 0.9999999])
def test_what_does_not_change_is_averaged_to_the_bit(decay):
    (params,) = _series(1)
    extras = init_ema(TrainConfig(ema_decay=decay), params)
    for _ in range(50):
        extras = average(extras, params, OK, decay, donate=True)
    assert tree_equal(averaged(params, extras), params)


def test_without_a_decay_nothing_is_kept():
    (params,) = _series(1)
    assert init_ema(TrainConfig(), params) == {} and average({}, params, OK, None) == {}
    assert averaged(params, {}) is params


def test_bf16_parameters_are_averaged_in_fp32_and_come_back_in_bf16():
    params = {"a": torch.full((4,), 1.0, dtype=torch.bfloat16)}
    extras = init_ema(TrainConfig(ema_decay=0.999), params)
    for n in range(200):  # steps of the average that bf16 could not make
        extras = average(extras, {"a": params["a"] + n % 2 * 0.0078125}, OK, 0.999)
    mean = extras["ema"]["mean"]["a"]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.full((4,), 1.0 + 0.0078125 / 2), rtol=1e-4, atol=0)
    assert averaged(params, extras)["a"].dtype == torch.bfloat16


def _started(config: JobConfig, **options):
    step, state = _build(config, **options)
    return step, init_state(state.params, state.opt_state, {**state.extras, **init_ema(config.train, state.params)})


@pytest.mark.parametrize("donate", [False, True])
def test_the_step_keeps_the_mean_of_the_parameters_after_each_update(donate):
    step, state = _started(_config(ema_decay=0.5), donate=donate)
    seen = []
    for seed in range(3):
        state, _ = step(state, _batch(seed))
        seen.append(tree_clone(state.params))
    used = averaged(state.params, state.extras)
    for name in used:
        mean = (seen[0][name] / 4 + seen[1][name] / 2 + seen[2][name]) / 1.75
        torch.testing.assert_close(used[name], mean, rtol=1e-5, atol=1e-6)


def test_a_mapped_sweep_keeps_an_average_of_each_run():
    step, state = _started(_config(model=PER_SAMPLE, ema_decay=0.5, grad_clip_norm=None), transform="func")
    other = evolve(state, params={name: 1.1 * p for name, p in state.params.items()})
    after, _ = torch.func.vmap(step, in_dims=(0, None))(tree_stack([state, other]), _batch(0))
    for one, alone in zip(tree_unstack(after), (state, other), strict=True):
        expected, _ = step(alone, _batch(0))
        for name, mean in expected.extras["ema"]["mean"].items():
            torch.testing.assert_close(one.extras["ema"]["mean"][name], mean, rtol=1e-4, atol=1e-5)


def test_a_state_without_an_average_is_one_line():
    step, state = _build(_config(ema_decay=0.5))
    with pytest.raises(ConfigError, match="init_ema"):
        step(state, _batch(0))


def test_schedule_free_keeps_its_own():
    with pytest.raises(ConfigError, match=r"train\.ema_decay"):
        JobConfig(train=TrainConfig(ema_decay=0.9), optimizer=ScheduleFree(), scheduler=NoSchedule())
