"""Schedules: a function of the update's number, bounded, continuous, at its floor on the last update."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from forge.config import REX, SGD, WSD, AdamW, Constant, Cosine, DataPhase, Linear, Lion, Muon, NoSchedule, ScheduleFree
from forge.training.optimizer import build_optimizer
from forge.training.scheduler import build_scheduler, scaled_by_phase

DECAYS = ["cosine", "linear", "sqrt", "one_minus_sqrt"]


@st.composite
def _runs(draw, least_decay=2):
    """A decaying schedule, the length of its run, its first update of decay and its floor."""
    floor = draw(st.sampled_from([0.0, 0.1, 0.37, 1.0]))
    warmup, stable = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    kind = draw(st.sampled_from(["cosine", "linear", "wsd", "rex"]))
    start = warmup + (stable if kind == "wsd" else 0)
    total = start + draw(st.integers(least_decay, 200))
    common = {"warmup_steps": warmup, "min_lr_ratio": floor}
    match kind:
        case "cosine":
            return Cosine(**common), total, start, floor
        case "linear":
            return Linear(**common), total, start, floor
        case "wsd":
            return WSD(**common, stable_steps=stable, decay=draw(st.sampled_from(DECAYS))), total, start, floor
    return REX(**common, alpha=draw(st.sampled_from([None, 1, 0.5, 2.0]))), total, start, floor


@pytest.mark.parametrize(
    "config",
    [
        Cosine(warmup_steps=4),
        Linear(warmup_steps=4),
        WSD(warmup_steps=4),
        REX(warmup_steps=4),
        Constant(warmup_steps=4),
    ],
)
def test_warmup_is_linear_and_never_zero(config):
    schedule = build_scheduler(config, 100)
    assert [schedule(n) for n in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(4) == 1.0


def test_cosine_and_linear_start_at_one_after_warmup_and_end_exactly_at_the_floor():
    cosine = build_scheduler(Cosine(warmup_steps=2, min_lr_ratio=0.1), 10)
    linear = build_scheduler(Linear(warmup_steps=2, min_lr_ratio=0.1), 10)
    for schedule in (cosine, linear):
        assert schedule(2) == 1.0
        assert [schedule(n) for n in (9, 10, 11, 10**6)] == [0.1] * 4
    assert cosine(4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 2 / 7)) / 2)
    assert linear(4) == pytest.approx(0.1 + 0.9 * (1 - 2 / 7))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd_is_stable_then_decays_to_its_floor_at_the_last_update(decay, floor):
    schedule = build_scheduler(WSD(warmup_steps=2, stable_steps=5, decay=decay, min_lr_ratio=floor), 12)
    assert schedule(0) == 0.5
    assert [schedule(n) for n in range(1, 8)] == [1.0] * 7
    assert schedule(11) == schedule(12) == floor
    shapes = {"cosine": 0.5, "linear": 0.5, "sqrt": 0.5**0.5, "one_minus_sqrt": 1 - 0.5**0.5}
    assert schedule(9) == pytest.approx(floor + (1 - floor) * shapes[decay])


def test_wsd_without_stable_steps_decays_over_the_last_fifth():
    schedule = build_scheduler(WSD(warmup_steps=10, decay="linear"), 100)
    assert all(schedule(n) == 1.0 for n in range(9, 81))
    assert schedule(81) == pytest.approx(1 - 1 / 19)
    assert schedule(99) == 0.0


def test_rex_is_the_papers_or_a_power_with_a_floor():
    paper = build_scheduler(REX(warmup_steps=0), 11)
    power = build_scheduler(REX(warmup_steps=0, alpha=2, min_lr_ratio=0.3), 11)
    assert [paper(n) for n in (0, 4, 10)] == pytest.approx([1.0, 0.6 / 0.8, 0.0])
    assert [power(n) for n in (0, 4, 6, 10)] == pytest.approx([1.0, 0.36, 0.3, 0.3])


def test_decay_steps_end_the_decay_early():
    for config in (Cosine, Linear, REX):
        schedule = build_scheduler(config(warmup_steps=2, decay_steps=4, min_lr_ratio=0.1), 100)
        assert schedule(4) > 0.1 + 1e-6
        assert [schedule(n) for n in (5, 6, 99)] == [0.1] * 3


def test_unset_warmup_is_five_percent_of_the_run():
    schedule = build_scheduler(Constant(), 200)
    assert (schedule(8), schedule(9), schedule(150)) == (0.9, 1.0, 1.0)
    assert build_scheduler(Constant(), 10)(0) == 1.0


def test_no_schedule_is_one_everywhere():
    schedule = build_scheduler(NoSchedule(), 10)
    assert (schedule(0), schedule(5), schedule(1000)) == (1.0, 1.0, 1.0)


def test_a_run_of_one_update_makes_it_at_the_peak():
    for config in (Cosine(), Linear(), REX(), WSD(), Constant(), NoSchedule()):
        assert build_scheduler(config, 1)(0) == 1.0


@settings(deadline=None, max_examples=100)
@given(run=_runs())
def test_after_warmup_it_falls_from_one_to_the_floor_which_the_last_update_has(run):
    config, total, start, floor = run
    values = build_scheduler(config, total)(torch.arange(total + 5, dtype=torch.float64)).tolist()
    after = values[config.warmup_steps :]
    assert all(floor - 1e-6 <= value <= 1 + 1e-6 for value in after)
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(after))
    assert after[: start - config.warmup_steps + 1] == pytest.approx([1.0] * (start - config.warmup_steps + 1))
    assert values[total - 1 :] == pytest.approx([floor] * 6, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(run=_runs())
def test_it_is_continuous_no_update_jumps_further_than_the_steepest_shape(run):
    config, total, start, _ = run
    values = build_scheduler(config, total)(torch.arange(total + 5)).tolist()
    span = max(1, total - start - 1)
    # A square root is the steepest: it moves by sqrt(1 / span) over one update; powers and the paper's by 2 / span.
    bound = max((1 / span) ** 0.5, 2 / span) + 1e-5
    for n, (earlier, later) in enumerate(pairwise(values)):
        limit = 1 / config.warmup_steps + 1e-5 if n + 1 < config.warmup_steps else bound
        assert abs(later - earlier) <= limit


@settings(deadline=None, max_examples=50)
@given(run=_runs(least_decay=1), n=st.integers(0, 300))
def test_int_tensor_and_vmapped_forms_agree(run, n):
    config, total, *_ = run
    schedule = build_scheduler(config, total)
    value = schedule(n)
    assert isinstance(value, float)
    tensor = schedule(torch.tensor(n))
    assert tensor.dtype == torch.float32 and tensor.shape == ()
    assert tensor.item() == pytest.approx(value, abs=1e-3 if value < 0.05 else 1e-4)
    steps = torch.arange(n, n + 4)
    torch.testing.assert_close(torch.func.vmap(schedule)(steps), torch.stack([schedule(step) for step in steps]))


@pytest.mark.parametrize("config", [AdamW(), Muon(), Lion(), ScheduleFree(), SGD()], ids=lambda config: config.name)
def test_fifty_steps_compile_once(config):
    roles = {"w": "hidden", "norm": "vector"}
    optimizer, schedule = build_optimizer(config, roles), build_scheduler(Cosine(warmup_steps=3), 50)
    counter = CompileCounter()

    def step(n, grads, state, params):
        lr = config.lr * schedule(n)
        params, state = optimizer.update(grads, state, params, lr)
        return n + 1, params, state, lr

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    n, params = torch.tensor(0), {"w": torch.randn(3, 2), "norm": torch.randn(2)}
    state = optimizer.init(params)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    for k in range(50):
        n, params, state, lr = compiled(n, grads, state, params)
        assert lr.item() == pytest.approx(config.lr * schedule(k), rel=1e-4)
    assert n.item() == 50 and counter.frame_count == 1


@pytest.mark.parametrize("config", [Cosine(warmup_steps=2), Constant(), NoSchedule()], ids=lambda c: c.name)
def test_a_phase_scales_the_rate_from_its_first_update_on_up_to_the_next(config):
    plain = build_scheduler(config, 40)
    scaled = scaled_by_phase(plain, (DataPhase(10, lr_scale=0.5), DataPhase(30, lr_scale=2.0)))
    for n, scale in [(0, 1.0), (9, 1.0), (10, 0.5), (29, 0.5), (30, 2.0), (39, 2.0)]:
        assert scaled(n) == pytest.approx(scale * plain(n))
        assert float(scaled(torch.tensor(n))) == pytest.approx(scaled(n))
