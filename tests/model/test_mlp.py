"""The dense MLP by its formulas."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from forge.config import ModelConfig
from forge.model.mlp import MLP

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _mlp(kind, bias=False):
    mlp = MLP(ModelConfig(dim=8, n_heads=2, mlp=kind, bias=bias), 12)
    generator = torch.Generator().manual_seed(1)
    return mlp, {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in mlp.named_parameters()}


def _gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("kind", "act"), [("swiglu", F.silu), ("geglu", _gelu)])
def test_gated_mlps_are_down_of_act_gate_times_up(kind, act):
    mlp, w = _mlp(kind)
    expected = (act(X @ w["w_gate.weight"].T) * (X @ w["w_up.weight"].T)) @ w["w_down.weight"].T
    torch.testing.assert_close(functional_call(mlp, w, (X,)), expected)


@pytest.mark.parametrize(("kind", "act"), [("gelu", _gelu), ("relu2", lambda x: x.clamp(min=0) ** 2)])
def test_plain_mlps_have_two_matrices(kind, act):
    mlp, w = _mlp(kind)
    assert sorted(w) == ["w_down.weight", "w_up.weight"]
    torch.testing.assert_close(functional_call(mlp, w, (X,)), act(X @ w["w_up.weight"].T) @ w["w_down.weight"].T)


def test_biases_are_added_before_the_nonlinearity_and_at_the_end():
    mlp, w = _mlp("gelu", bias=True)
    expected = F.linear(_gelu(F.linear(X, w["w_up.weight"], w["w_up.bias"])), w["w_down.weight"], w["w_down.bias"])
    torch.testing.assert_close(functional_call(mlp, w, (X,)), expected)


def test_tokens_do_not_see_each_other():
    mlp, w = _mlp("swiglu")
    torch.testing.assert_close(functional_call(mlp, w, (X[:, 1],)), functional_call(mlp, w, (X,))[:, 1])
