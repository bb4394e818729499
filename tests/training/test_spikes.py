"""A spike changes nothing but the step counter and the window; what is one follows from the updates before it."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import SGD, JobConfig, TrainConfig
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.pytree import tree_clone, tree_equal, tree_stack, tree_unstack
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_loss_fn
from forge.training.optimizer import build_optimizer, parameter_roles
from forge.training.spikes import build_spike_filter, init_spikes
from forge.training.state import init_state
from forge.training.step import build_train_step
from tests.training.test_step import MODEL, OPTIMIZERS, _batch, _config

WATCHFUL = TrainConfig(spike_sigma=3.0, spike_window=4)
OK = torch.tensor(True)


def _feed(config, pairs, good=None):
    """The verdicts over (loss, grad_norm) pairs, and the extras after the last."""
    keep, extras, verdicts = build_spike_filter(config), init_spikes(config), []
    for index, pair in enumerate(pairs):
        finite = OK if good is None else torch.tensor(good[index])
        accepted, extras = keep(extras, *map(torch.tensor, pair), finite)
        verdicts.append(bool(accepted))
    return verdicts, extras


def test_without_sigma_nothing_is_kept_and_nothing_refused():
    verdicts, extras = _feed(TrainConfig(), [(1.0, 1.0)] * 200 + [(1e9, 1e9)])
    assert all(verdicts) and extras == {}


@pytest.mark.parametrize("spike", [(9.0, 1.0), (2.0, 9.0), (9.0, 9.0)])
def test_a_spike_of_either_is_refused_once_the_window_is_full(spike):
    calm = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9), (2.0, 1.0)]
    assert _feed(WATCHFUL, [*calm[:3], spike])[0] == [True] * 4
    verdicts, extras = _feed(WATCHFUL, [*calm, spike, (2.0, 1.0)])
    assert verdicts == [True] * 4 + [False, True]
    assert int(extras["spikes"]["seen"]) == 6


def test_a_level_that_stays_becomes_the_usual_one():
    calm = [(2.0 + 0.1 * (n % 3), 1.0 + 0.1 * (n % 2)) for n in range(40)]
    config = TrainConfig(spike_sigma=6.0, spike_window=40)
    verdicts, _ = _feed(config, [*calm, *[(3.0, 1.0)] * 12])
    assert verdicts[40] is False and all(verdicts[42:])


def test_values_below_the_usual_and_a_constant_are_no_spikes():
    calm = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9), (2.0, 1.0)]
    assert all(_feed(WATCHFUL, [*calm, (0.01, 0.01)])[0])
    assert all(_feed(WATCHFUL, [(0.1, 0.3)] * 9)[0])


@settings(deadline=None)
@given(
    losses=st.lists(st.tuples(st.floats(0, 10, width=32), st.booleans()), max_size=30),
    window=st.integers(2, 6),
    sigma=st.floats(0.5, 4),
)
def test_the_filter_is_the_rule_over_the_last_finite_values(losses, window, sigma):
    config = TrainConfig(spike_sigma=sigma, spike_window=window)
    seen, expected = [], []
    for loss, finite in losses:
        last = seen[-window:]
        limit = statistics.fmean(last) + sigma * statistics.stdev(last) if len(last) == window else math.inf
        if abs(loss - limit) < 1e-6:
            return  # a matter of rounding
        expected.append(finite and loss <= limit)
        seen += [loss] if finite else []
    assert _feed(config, [(loss, 1.0) for loss, _ in losses], [finite for _, finite in losses])[0] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_enters_the_window(bad):
    verdicts, extras = _feed(WATCHFUL, [(bad, 1.0), (1.0, bad)], [False, False])
    assert verdicts == [False, False]
    assert tree_equal(extras, init_spikes(WATCHFUL))


def test_a_state_without_a_window_is_one_line():
    with pytest.raises(ConfigError, match="init_spikes"):
        build_spike_filter(WATCHFUL)({}, torch.tensor(1.0), torch.tensor(1.0), OK)


def _step(config: JobConfig, donate=False, transform="backward"):
    model = build_model(config.model)
    optimizer, loss_fn = build_optimizer(config.optimizer, parameter_roles(model)), build_loss_fn(config.train, MODEL)
    seam = build_value_and_grad(model, loss_fn, vocab_size=13, transform=transform)
    factor = torch.tensor(1.0)

    def scaled(params, extras, batch):
        sums, grads = seam(params, extras, batch)
        return sums, {name: grad * factor for name, grad in grads.items()}

    step = build_train_step(
        config, value_and_grad=scaled, optimizer=optimizer, schedule=lambda n: torch.ones(()), donate=donate
    )
    params = init_params(model, config.model, 0)
    return step, init_state(params, optimizer.init(params), init_spikes(config.train)), factor


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_spike_changes_nothing_but_the_counter_and_the_window(name, donate):
    step, state, factor = _step(_config(name, spike_sigma=3.0, spike_window=4), donate)
    for seed in range(4):
        state, result = step(state, _batch(seed))
        assert not bool(result.skipped)
    before = tree_clone(state)
    factor.fill_(1e4)
    state, result = step(state, _batch(5))
    assert bool(result.skipped) and float(result.grad_norm) > 100
    assert tree_equal(evolve(state, step=before.step, extras=before.extras), before) and int(state.step) == 5
    factor.fill_(1.0)
    state, result = step(state, _batch(6))
    assert not bool(result.skipped) and not tree_equal(state.params, before.params)


def test_a_mapped_sweep_skips_the_spike_of_one_run_alone():
    per_sample = evolve(MODEL, attention_backend="math")
    config = evolve(
        _config(model=per_sample, grad_clip_norm=None, spike_sigma=3.0, spike_window=4), optimizer=SGD(lr=0.1)
    )
    step, state, _ = _step(config, transform="func")
    for seed in range(4):
        state, _ = step(state, _batch(seed))
    shaken = evolve(state, params={name: 30 * p for name, p in state.params.items()})
    after, results = torch.func.vmap(step, in_dims=(0, None))(tree_stack([state, shaken]), _batch(7))
    assert results.skipped.tolist() == [False, True]
    calm, bad = tree_unstack(after)
    assert tree_equal(bad.params, shaken.params) and not tree_equal(calm.params, state.params)
    assert calm.extras["spikes"]["seen"] == 5 and bad.extras["spikes"]["seen"] == 5
