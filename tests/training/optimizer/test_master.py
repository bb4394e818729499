"""fp32 masters: what bf16 would round away adds up."""

from __future__ import annotations

import pytest
import torch

from forge.config import AdamW
from forge.pytree import tree_clone
from forge.training.optimizer import apply_update, build_optimizer, with_master_weights

BF16 = torch.bfloat16


def _run(optimizer, params, updates, donate=False):
    state = optimizer.init(params)
    for _ in range(updates):
        params, state = apply_update(
            optimizer, {name: torch.ones_like(p) for name, p in params.items()}, state, params,
            lr=torch.tensor(1e-4), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
        )  # fmt: skip
    return params, state


@pytest.mark.parametrize("donate", [False, True])
def test_a_hundred_small_steps_move_a_bf16_weight(donate):
    optimizer = with_master_weights(build_optimizer(AdamW(weight_decay=0.0), {"w": "hidden"}))
    params, state = _run(optimizer, {"w": torch.ones(1, 1, dtype=BF16)}, 100, donate)
    assert params["w"].dtype == BF16
    assert state["master"]["w"].item() == pytest.approx(0.99, abs=1e-5)
    assert params["w"].item() == pytest.approx(0.99, abs=0.004)  # a bf16 step below 1 is 0.0039


def test_without_masters_the_same_steps_would_be_lost():
    optimizer = build_optimizer(AdamW(weight_decay=0.0), {"w": "hidden"})
    params, _ = _run(optimizer, {"w": torch.ones(1, 1, dtype=BF16)}, 100)
    assert params["w"].item() == 1.0


@pytest.mark.parametrize("donate", [False, True])
def test_the_master_follows_the_run_in_fp32_and_the_parameter_is_its_rounding(donate):
    plain = build_optimizer(AdamW(), {"w": "hidden"})
    params = {"w": torch.randn(3, 4).to(BF16)}
    exact, _ = _run(plain, {"w": params["w"].float()}, 10)
    rounded, state = _run(with_master_weights(plain), tree_clone(params), 10, donate)
    torch.testing.assert_close(state["master"], exact)
    assert torch.equal(rounded["w"], state["master"]["w"].to(BF16))
