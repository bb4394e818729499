"""AdamW against torch's."""

from __future__ import annotations

import pytest
import torch

from forge.config import AdamW
from forge.training.optimizer import apply_update, build_optimizer

ROLES = {"w": "hidden", "norm": "vector"}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype,rtol", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_adamw_is_torchs_adamw(donate, dtype, rtol):
    config = AdamW(beta1=0.8, beta2=0.999, eps=1e-6, weight_decay=0.2)
    optimizer = build_optimizer(config, ROLES)
    params = {"w": torch.randn(3, 4, dtype=dtype), "norm": torch.randn(4, dtype=dtype)}
    theirs = {name: p.clone().requires_grad_() for name, p in params.items()}
    groups = [{"params": [theirs["w"]]}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.2)
    state = optimizer.init(params)
    for update in range(20):
        grads = {name: torch.randn_like(p) * 10.0 ** (update % 3) for name, p in params.items()}
        for name, grad in grads.items():
            theirs[name].grad = grad.clone()
        reference.step()
        params, state = apply_update(
            optimizer, grads, state, params,
            lr=torch.tensor(1e-2, dtype=dtype), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
        )  # fmt: skip
    torch.testing.assert_close(params, {name: p.detach() for name, p in theirs.items()}, rtol=rtol, atol=rtol)
    assert state["count"]["w"].item() == 20


def test_first_step_has_the_size_of_the_learning_rate_whatever_the_gradient():
    optimizer = build_optimizer(AdamW(weight_decay=0.0), ROLES)
    params = {"w": torch.zeros(1, 3)}
    grads = {"w": torch.tensor([[1e-4, -1.0, 1e4]])}
    after, _ = optimizer.update(grads, optimizer.init(params), params, torch.tensor(1e-3))
    torch.testing.assert_close(after["w"], torch.tensor([[-1e-3, 1e-3, -1e-3]]), rtol=2e-4, atol=0.0)
