"""Schedule-free AdamW against a transcription that keeps x, y and z apart."""

from __future__ import annotations

import pytest
import torch

from forge.config import Constant, JobConfig, NoSchedule, ScheduleFree
from forge.errors import ConfigError
from forge.pytree import tree_clone, tree_equal
from forge.training.optimizer import apply_update, build_optimizer, with_master_weights

ROLES = {"w": "hidden", "norm": "vector"}
ONE, TRUE = torch.tensor(1.0), torch.tensor(True)


def _reference(config: ScheduleFree, start, grads, lrs, decays):
    """Defazio et al. 2024, algorithm 1 with x, y, z in float64 -> the last x and y."""
    x = y = z = start.double()
    v, total = torch.zeros_like(x), 0.0
    for k, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        g = g.double()
        if config.warmup_steps:
            lr = lr * min(1.0, k / config.warmup_steps)
        v = config.beta2 * v + (1 - config.beta2) * g**2
        direction = g / ((v / (1 - config.beta2**k)).sqrt() + config.eps) + (config.weight_decay * y if decays else 0.0)
        z = z - lr * direction
        weight = lr**config.weight_lr_power * k**config.r
        total += weight
        c = weight / total if total else 0.0
        x = (1 - c) * x + c * z
        y = (1 - config.beta1) * z + config.beta1 * x
    return x, y


def _run(optimizer, params, grads, lrs, *, donate=False):
    state = optimizer.init(params)
    for g, lr in zip(grads, lrs, strict=True):
        params, state = apply_update(
            optimizer, tree_clone(g), state, params, lr=torch.tensor(lr, dtype=torch.float64 if not donate else torch.float32),
            scale=ONE, ok=TRUE, donate=donate,
        )  # fmt: skip
    return params, state


@pytest.mark.parametrize("donate,dtype,tolerance", [(False, torch.float64, 2e-6), (True, torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "config",
    [
        ScheduleFree(),
        ScheduleFree(warmup_steps=5),
        ScheduleFree(r=2.0, weight_lr_power=1.0, weight_decay=0.0),
        ScheduleFree(beta1=0.5, beta2=0.99, warmup_steps=3, r=1.0),
    ],
)
def test_y_and_the_average_x_follow_the_papers_sequences(config, donate, dtype, tolerance):
    optimizer = build_optimizer(config, ROLES)
    params = {"w": torch.randn(3, 4, dtype=dtype), "norm": torch.randn(4, dtype=dtype)}
    start = tree_clone(params)
    lrs = [0.02] * 10 + [0.01] * 10
    grads = [{name: torch.randn_like(p) for name, p in params.items()} for _ in lrs]
    params, state = _run(optimizer, params, grads, lrs, donate=donate)
    averaged = optimizer.eval_params(params, state)
    for name in params:
        x, y = _reference(config, start[name], [g[name] for g in grads], lrs, decays=name == "w")
        torch.testing.assert_close(params[name].double(), y, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(averaged[name].double(), x, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(averaged[name], params[name], atol=1e-4)


def test_with_a_constant_lr_the_evaluated_parameters_are_the_mean_of_z():
    optimizer = build_optimizer(ScheduleFree(), ROLES)
    params = {"norm": torch.randn(4, dtype=torch.float64)}
    state, seen = optimizer.init(params), []
    for _ in range(6):
        params, state = optimizer.update({"norm": torch.randn(4).double()}, state, params, torch.tensor(0.05))
        seen.append(state["z"]["norm"])
    torch.testing.assert_close(
        optimizer.eval_params(params, state)["norm"], torch.stack(seen).mean(0), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_evaluating_in_the_middle_leaves_the_next_step_bit_identical(donate, masters):
    optimizer = build_optimizer(ScheduleFree(), ROLES)
    optimizer = with_master_weights(optimizer) if masters else optimizer
    dtype = torch.bfloat16 if masters else torch.float32
    start = {"w": torch.randn(3, 4).to(dtype)}
    grads = [{"w": torch.randn(3, 4).to(dtype)} for _ in range(4)]

    def run(evaluate):
        params, state = tree_clone(start), optimizer.init(start)
        for g in grads:
            params, state = apply_update(
                optimizer, tree_clone(g), state, params, lr=torch.tensor(0.1), scale=ONE, ok=TRUE, donate=donate
            )
            if evaluate:
                averaged = optimizer.eval_params(params, state)
                averaged["w"].zero_()  # whatever is done with the result
        return params, state

    assert tree_equal(run(True), run(False))


def test_a_zero_learning_rate_divides_by_nothing():
    optimizer = build_optimizer(ScheduleFree(), ROLES)
    params = {"w": torch.ones(2, 2)}
    for donate in (False, True):
        after, state = apply_update(
            optimizer, {"w": torch.ones(2, 2)}, optimizer.init(params), tree_clone(params),
            lr=torch.tensor(0.0), scale=ONE, ok=TRUE, donate=donate,
        )  # fmt: skip
        assert tree_equal(after, params)
        torch.testing.assert_close(optimizer.eval_params(after, state), params)


def test_a_decaying_schedule_beside_it_is_refused_the_default_one_included():
    with pytest.raises(ConfigError, match=r"scheduler\.name"):
        JobConfig(optimizer=ScheduleFree())
    for fine in (NoSchedule(), Constant()):
        assert JobConfig(optimizer=ScheduleFree(), scheduler=fine).scheduler == fine


def test_frozen_parameters_are_evaluated_as_they_are():
    optimizer = build_optimizer(ScheduleFree(), ROLES)
    params = {"w": torch.ones(2, 2), "norm": torch.ones(2)}
    state = optimizer.init({"w": params["w"]})
    params, state = optimizer.update({"w": torch.ones(2, 2)}, state, params, torch.tensor(0.1))
    assert optimizer.eval_params(params, state)["norm"] is params["norm"]
