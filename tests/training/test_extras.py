"""What learns without a gradient: there only for sigmoid routers, and moved once an update, or not at all.

And what routers did, in numbers for the log.
"""

from __future__ import annotations

import pytest
import torch

from forge.config import ModelConfig, MoEConfig
from forge.training.extras import balance_routers, init_extras, router_bias, routing
from forge.training.loss import LossSums

GOOD = torch.tensor(True)


def _config(**moe):
    return ModelConfig(dim=16, n_layers=4, n_heads=2, moe=MoEConfig(**moe))


def test_biases_are_zero_for_each_layer_with_experts():
    extras = init_extras(_config(n_experts=4, router="sigmoid", frequency=2))
    assert list(extras["router_bias"]) == ["1", "3"]
    assert all(torch.equal(bias, torch.zeros(4)) for bias in extras["router_bias"].values())
    assert router_bias(extras) == extras


@pytest.mark.parametrize("moe", [{}, {"router": "sigmoid"}, {"n_experts": 4}])
def test_dense_models_and_softmax_routers_have_none(moe):
    extras = init_extras(_config(**moe))
    assert extras == {} and router_bias(extras) == {}
    assert balance_routers(extras, None, GOOD, 0.1) == {}


def test_the_biases_are_made_on_the_device_asked_for():
    extras = init_extras(_config(n_experts=4, router="sigmoid"), "meta")
    assert {bias.device.type for bias in extras["router_bias"].values()} == {"meta"}


def _balanced(good):
    extras = {"router_bias": {"0": torch.tensor([0.5, 0.0, 0.0])}, "other": torch.ones(1)}
    counts = {"0": torch.tensor([9, 0, 3])}
    return extras, balance_routers(extras, counts, torch.tensor(good), 0.125)


def test_the_busy_expert_goes_down_and_the_idle_one_up_by_the_rate():
    extras, moved = _balanced(True)
    bias, before = moved["router_bias"]["0"], extras["router_bias"]["0"]
    assert bias[0] < before[0] and bias[1] > before[1]
    assert float((bias - before).abs().max()) == pytest.approx(0.125, rel=0.5)
    assert moved["other"] is extras["other"]
    assert torch.equal(before, torch.tensor([0.5, 0.0, 0.0]))


def test_a_skipped_update_moves_no_bias():
    extras, moved = _balanced(False)
    assert torch.equal(moved["router_bias"]["0"], extras["router_bias"]["0"])


def _sums(**routers):
    zero = torch.zeros(())
    return LossSums(total=zero, ce=zero, z=zero, aux=zero, tokens=zero.long(), **routers)


def test_routing_is_the_load_of_the_busiest_the_mean_entropy_and_the_share_dropped():
    # 6 tokens, 2 experts each, 2 layers of 4 experts: mean load 3, busiest 6 and 3.
    counts = {"0": torch.tensor([6, 6, 0, 0]), "1": torch.tensor([3, 3, 3, 3])}
    sums = _sums(router_counts=counts, router_entropy=torch.tensor(6.0), router_dropped=torch.tensor(3))
    found = {name: float(value) for name, value in routing(sums, top_k=2).items()}
    assert found == pytest.approx({"moe_balance": (6 / 3 + 3 / 3) / 2, "moe_entropy": 6 / 12, "moe_dropped": 3 / 24})


def test_a_dense_model_routes_nothing():
    assert routing(_sums(), top_k=2) == {}
