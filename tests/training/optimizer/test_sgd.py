"""SGD against torch's, and its decoupled decay."""

from __future__ import annotations

import pytest
import torch

from forge.config import SGD
from forge.training.optimizer import apply_update, build_optimizer


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs_sgd(momentum, nesterov, donate):
    optimizer = build_optimizer(SGD(momentum=momentum, nesterov=nesterov), {"w": "hidden"})
    params = {"w": torch.randn(3, 4)}
    theirs = params["w"].clone().requires_grad_()
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, nesterov=nesterov)
    state = optimizer.init(params)
    for _ in range(20):
        grads = {"w": torch.randn(3, 4)}
        theirs.grad = grads["w"].clone()
        reference.step()
        params, state = apply_update(
            optimizer, grads, state, params,
            lr=torch.tensor(0.1), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
        )  # fmt: skip
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_shrinks_the_weight_beside_the_step_and_stays_out_of_the_momentum(nesterov):
    def run(weight_decay):
        optimizer = build_optimizer(SGD(nesterov=nesterov, weight_decay=weight_decay), {"w": "hidden"})
        return optimizer.update(grads, optimizer.init(params), params, torch.tensor(0.1, dtype=torch.float64))

    params = {"w": torch.randn(3, 4, dtype=torch.float64)}
    grads = {"w": torch.randn(3, 4, dtype=torch.float64)}
    plain, plain_state = run(0.0)
    decayed, decayed_state = run(0.5)
    torch.testing.assert_close(decayed["w"], plain["w"] - 0.1 * 0.5 * params["w"])
    torch.testing.assert_close(decayed_state, plain_state, rtol=0, atol=0)
