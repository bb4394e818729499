"""Lion against the paper's formula."""

from __future__ import annotations

import pytest
import torch

from forge.config import AdamW, Lion
from forge.training.optimizer import apply_update, build_optimizer


def test_lion_takes_its_own_default_betas_when_the_user_set_none():
    assert (Lion().beta1, Lion().beta2) == (0.9, 0.99)
    assert (Lion(lr=1e-3).beta1, Lion(lr=1e-3).beta2) == (0.9, 0.99)
    assert (AdamW().beta1, AdamW().beta2) == (0.9, 0.95)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("config", [Lion(), Lion(beta1=0.5, beta2=0.8, weight_decay=0.1)])
def test_lion_is_algorithm_2_of_the_paper(config, donate):
    optimizer = build_optimizer(config, {"w": "hidden"})
    params = {"w": torch.randn(3, 4)}
    theta, m, lr = params["w"].double(), torch.zeros(3, 4, dtype=torch.float64), 0.01
    state = optimizer.init(params)
    for _ in range(20):
        g = torch.randn(3, 4)
        c = config.beta1 * m + (1 - config.beta1) * g.double()
        theta = theta - lr * (c.sign() + config.weight_decay * theta)
        m = config.beta2 * m + (1 - config.beta2) * g.double()
        params, state = apply_update(
            optimizer, {"w": g}, state, params,
            lr=torch.tensor(lr), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
        )  # fmt: skip
    torch.testing.assert_close(params["w"].double(), theta, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state["momentum"]["w"].double(), m, rtol=1e-5, atol=1e-6)
