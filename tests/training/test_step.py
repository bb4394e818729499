"""The step: pure, donated or not; finite or skipped; one body for a sweep of many runs."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import (
    SGD,
    AdamW,
    Constant,
    JobConfig,
    Lion,
    ModelConfig,
    Muon,
    NoSchedule,
    ScheduleFree,
    TrainConfig,
)
from forge.data.batch import IGNORE, Batch
from forge.errors import DonatedError
from forge.model import build_model, init_params
from forge.pytree import tree_clone, tree_equal, tree_map, tree_stack, tree_unstack
from forge.training.eval import build_eval_step, run_eval
from forge.training.extras import init_extras
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_eval_loss_fn, build_loss_fn
from forge.training.optimizer import build_optimizer, parameter_roles
from forge.training.scheduler import build_scheduler
from forge.training.state import init_state
from forge.training.step import build_train_step

MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=16, qk_norm=True)
PER_SAMPLE = evolve(MODEL, attention_backend="math")  # the CPU's flash kernel has no batching rule
OPTIMIZERS = {
    "adamw": AdamW(lr=3e-3),
    "muon": Muon(lr=0.02, adam_lr=3e-3),
    "lion": Lion(lr=1e-3),
    "schedule_free": ScheduleFree(lr=3e-3),
    "sgd": SGD(lr=0.1),
}


def _config(optimizer="adamw", model=MODEL, **train) -> JobConfig:
    scheduler = NoSchedule() if optimizer == "schedule_free" else Constant(warmup_steps=0)
    train = TrainConfig(seq_len=8, global_batch_size=4, micro_batch_size=2, steps=100, **train)
    return JobConfig(model=model, train=train, optimizer=OPTIMIZERS[optimizer], scheduler=scheduler)


def _build(config: JobConfig, *, donate=False, transform="backward", value_and_grad=None, schedule=None):
    model = build_model(config.model)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    loss_fn = build_loss_fn(config.train, config.model)
    seam = value_and_grad or build_value_and_grad(
        model, loss_fn, vocab_size=config.model.vocab_size, transform=transform
    )
    schedule = schedule or build_scheduler(config.scheduler, config.train.steps)
    params = init_params(model, config.model, 0)
    state = init_state(params, optimizer.init(params), init_extras(config.model))
    return build_train_step(config, value_and_grad=seam, optimizer=optimizer, schedule=schedule, donate=donate), state


def _batch(seed=0, accumulation=2, ignored=0.2, sequences=2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (accumulation, sequences, 8), generator=generator)
    labels = torch.randint(0, 13, ids.shape, generator=generator)
    labels[torch.rand(ids.shape, generator=generator) < ignored] = IGNORE
    return Batch(ids, labels)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_donated_step_equals_the_pure_one(name):
    pure, state = _build(_config(name))
    donated, other = _build(_config(name), donate=True)
    for seed in range(4):
        state, result = pure(state, _batch(seed))
        other, result_ = donated(other, _batch(seed))
        torch.testing.assert_close(result_.loss, result.loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result_.grad_norm, result.grad_norm, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(other.params, state.params, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_arguments_give_the_same_bits_and_stay_untouched(name):
    step, state = _build(_config(name))
    state, _ = step(state, _batch(1))
    before, batch = tree_clone(state), _batch(2)
    first, second = step(state, batch), step(state, batch)
    assert tree_equal(first, second)
    assert tree_equal(state, before) and tree_equal(batch, _batch(2))


def test_a_donated_state_cannot_be_used_again():
    step, state = _build(_config(), donate=True)
    after, _ = step(state, _batch())
    for use in (lambda: state.params, lambda: step(state, _batch()), lambda: tree_map(lambda x: x, state)):
        with pytest.raises(DonatedError, match="donate=True"):
            use()
    assert int(after.step) == 1 and "donated" in repr(state)


def test_a_donating_step_reuses_the_storage_of_the_state():
    step, state = _build(_config(), donate=True)
    pointers = {name: p.data_ptr() for name, p in state.params.items()}
    after, _ = step(state, _batch())
    assert {name: p.data_ptr() for name, p in after.params.items()} == pointers


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("fault", ["inf in one gradient", "nan in one gradient", "nan loss", "no target"])
def test_a_bad_step_changes_nothing_but_the_counter(name, donate, fault):
    config = _config(name)
    model = build_model(config.model)
    seam = build_value_and_grad(model, build_loss_fn(config.train, config.model), vocab_size=13)
    broken = False

    def faulty(params, extras, batch):
        sums, grads = seam(params, extras, batch)
        if broken and "gradient" in fault:
            target = next(iter(grads))
            grads[target] = grads[target].clone()
            grads[target].view(-1)[3] = math.inf if "inf" in fault else math.nan
        if broken and fault == "nan loss":
            sums = evolve(sums, total=sums.total * math.nan)
        return sums, grads

    step, state = _build(config, donate=donate, value_and_grad=faulty)
    state, _ = step(state, _batch(0))
    before, broken = tree_clone(state), True
    state, result = step(state, _batch(1, ignored=1.0) if fault == "no target" else _batch(1))
    assert bool(result.skipped)
    assert tree_equal(evolve(state, step=before.step), before)
    assert int(state.step) == int(before.step) + 1
    if fault == "inf in one gradient":
        assert float(result.grad_norm) == math.inf
    if fault == "no target":
        assert float(result.loss) == 0.0 and int(result.tokens) == 0
    broken = False
    after, result = step(state, _batch(2))
    assert not bool(result.skipped) and all(torch.isfinite(p).all() for p in after.params.values())


def test_the_result_is_that_of_the_update():
    config = _config(z_loss_weight=0.1, grad_clip_norm=0.01)
    schedule = build_scheduler(Constant(warmup_steps=4), 100)
    step, state = _build(config, schedule=schedule)
    batch = _batch()
    seam = build_value_and_grad(build_model(MODEL), build_loss_fn(config.train, MODEL), vocab_size=13)
    sums, grads = seam(state.params, {}, batch)
    rates = []
    for n in range(5):
        state, result = step(state, batch)
        rates.append(float(result.lr))
        if n == 0:
            norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]))
            torch.testing.assert_close(result.grad_norm, norm)  # before clipping
            assert float(norm) > 0.01
            torch.testing.assert_close(result.loss, sums.total / sums.tokens)
            torch.testing.assert_close(result.loss, result.ce_loss + result.z_loss)
            assert int(result.tokens) == int((batch.labels != IGNORE).sum()) == int(state.tokens)
    assert rates == pytest.approx([3e-3 * m for m in (0.25, 0.5, 0.75, 1.0, 1.0)])


def test_the_loss_at_the_start_is_that_of_a_uniform_guess():
    step, state = _build(_config())
    _, result = step(state, _batch())
    assert float(result.loss) == pytest.approx(math.log(13), rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tiny_model_overfits_one_batch_to_near_zero(name):
    rates = {"adamw": AdamW(lr=1e-2, weight_decay=0.0), "muon": Muon(lr=0.03, adam_lr=1e-2, weight_decay=0.0),
             "lion": Lion(lr=2e-3, weight_decay=0.0), "schedule_free": ScheduleFree(lr=1e-2, weight_decay=0.0),
             "sgd": SGD(lr=0.5, momentum=0.95)}  # fmt: skip
    config = evolve(_config(name, evolve(MODEL, init_std=0.1)), optimizer=rates[name])
    step, state = _build(config, donate=True)
    batch = _batch(accumulation=1, ignored=0.0)
    for _ in range(300):
        state, result = step(state, batch)
    assert float(result.loss) < 0.05


def test_a_vmapped_sweep_of_learning_rates_equals_separate_runs():
    """K learning rates at once: K states stacked, one step, each with its own multiplier of the base rate."""
    multipliers = torch.tensor([0.1, 1.0, 3.0])
    config = _config("adamw", PER_SAMPLE)
    _, start = _build(config)
    model = build_model(PER_SAMPLE)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    loss_fn = build_loss_fn(config.train, PER_SAMPLE)
    seam = build_value_and_grad(model, loss_fn, vocab_size=13, transform="func")

    def one_run(multiplier, state, batch):
        step = build_train_step(config, value_and_grad=seam, optimizer=optimizer, schedule=lambda n: multiplier)
        return step(state, batch)

    stacked = tree_stack([start] * 3)
    alone = [start] * 3
    for seed in range(3):
        stacked, results = torch.func.vmap(one_run, in_dims=(0, 0, None))(multipliers, stacked, _batch(seed))
        alone = [one_run(m, state, _batch(seed))[0] for m, state in zip(multipliers, alone, strict=True)]
    assert results.loss.shape == (3,) and results.lr.tolist() == pytest.approx([3e-4, 3e-3, 9e-3])
    for vectorised, single in zip(tree_unstack(stacked), alone, strict=True):
        torch.testing.assert_close(vectorised.params, single.params, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stacked.params["embed.weight"][0], stacked.params["embed.weight"][2])


def _objective(seam_model, loss_fn):
    seam = build_value_and_grad(seam_model, loss_fn, vocab_size=13, transform="func")

    def gradient_of(params, ids, labels):
        return seam(params, {}, Batch(ids[None, None], labels[None, None]))[1]

    return gradient_of


def test_per_sample_gradients_are_those_of_one_sample_at_a_time():
    config = _config()
    model, batch = build_model(PER_SAMPLE), _batch(accumulation=1, sequences=5)
    params = init_params(model, MODEL, 0)
    gradient_of = _objective(model, build_loss_fn(config.train, MODEL))
    ids, labels = batch.input_ids[0], batch.labels[0]
    per_sample = torch.func.vmap(gradient_of, in_dims=(None, 0, 0))(params, ids, labels)
    for i in range(5):
        expected = gradient_of(params, ids[i], labels[i])
        torch.testing.assert_close({n: g[i] for n, g in per_sample.items()}, expected, rtol=1e-4, atol=1e-6)
    targets = (labels != IGNORE).sum(dim=1)
    weights = targets / targets.sum()  # the batch gradient is their mean by target tokens
    whole = build_value_and_grad(model, build_loss_fn(config.train, MODEL), vocab_size=13)(params, {}, batch)[1]
    mean = {name: torch.einsum("b,b...->...", weights, g) for name, g in per_sample.items()}
    torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-6)


def test_the_gradient_noise_scale_follows_from_per_sample_gradients():
    """McCandlish et al. 2018, app. A.1: tr(Sigma) / |G|^2 from norms at batch sizes 1 and B is the direct estimate."""
    model, batch = build_model(PER_SAMPLE), _batch(accumulation=1, sequences=8, ignored=0.0)
    params = init_params(model, MODEL, 0)
    gradient_of = _objective(model, build_loss_fn(_config().train, MODEL))
    per_sample = torch.func.vmap(gradient_of, in_dims=(None, 0, 0))(params, batch.input_ids[0], batch.labels[0])
    g = torch.cat([p.flatten(1) for p in per_sample.values()], dim=1).double()
    small, big, size = g.square().sum(1).mean(), g.mean(0).square().sum(), g.shape[0]
    signal = (size * big - small) / (size - 1)
    noise = (small - big) / (1 - 1 / size)
    assert float(noise) == pytest.approx(float(g.var(dim=0, unbiased=True).sum()), rel=1e-6)
    assert float(signal + noise / size) == pytest.approx(float(big), rel=1e-6)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 99), accumulation=st.sampled_from([1, 2, 4]))
def test_accumulation_does_not_change_the_update(seed, accumulation):
    step, state = _build(_config("sgd"))
    batch = _batch(seed, accumulation=1, sequences=4, ignored=0.5)
    regrouped = tree_map(lambda x: x.reshape(accumulation, -1, *x.shape[2:]), batch)
    torch.testing.assert_close(step(state, regrouped)[0].params, step(state, batch)[0].params, rtol=1e-4, atol=1e-6)


def test_evaluating_in_the_middle_changes_no_bit_of_the_training():
    for name in ("adamw", "schedule_free"):
        config = _config(name)
        model = build_model(MODEL)
        optimizer = build_optimizer(config.optimizer, parameter_roles(model))
        evaluate = build_eval_step(model, build_eval_loss_fn(config.train, MODEL), vocab_size=13)
        finals = []
        for look in (False, True):
            step, state = _build(config, donate=True)
            for seed in range(4):
                state, _ = step(state, _batch(seed))
                if look:
                    run_eval(evaluate, optimizer.eval_params(state.params, state.opt_state), state.extras, [_batch(9)])
            finals.append(state)
        assert tree_equal(*finals)


def test_sigmoid_routers_move_their_bias_once_an_update_and_not_in_evaluation():
    moe = evolve(MODEL.moe, n_experts=4, top_k=2, router="sigmoid", bias_update_rate=0.01)
    config = _config("adamw", evolve(MODEL, moe=moe))
    step, state = _build(config)
    whole, _ = step(state, _batch(accumulation=1, sequences=4, ignored=0.0))
    split = tree_map(lambda x: x.reshape(4, 1, 8), _batch(accumulation=1, sequences=4, ignored=0.0))
    parts, _ = step(state, split)
    assert tree_equal(whole.extras, parts.extras)
    moved = torch.stack(list(whole.extras["router_bias"].values()))
    assert moved.abs().max() == pytest.approx(0.01) and moved.any()
