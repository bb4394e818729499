"""Norms by their formulas, and in fp32 inside whatever the input."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from forge.config import ModelConfig
from forge.model.norm import LayerNorm, RMSNorm, build_norm

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
BIAS = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)


def test_rmsnorm_is_its_formula():
    expected = X / (X.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT
    torch.testing.assert_close(functional_call(RMSNorm(8, 1e-5), {"weight": WEIGHT}, (X,)), expected)


def test_layernorm_is_its_formula():
    centred = X - X.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * WEIGHT + BIAS
    found = functional_call(LayerNorm(8, 1e-5, bias=True), {"weight": WEIGHT, "bias": BIAS}, (X,))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", [RMSNorm(4096, 1e-5), LayerNorm(4096, 1e-5, bias=False)])
def test_bf16_inputs_are_summed_in_fp32_and_come_back_in_bf16(norm):
    x = (1 + torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))).bfloat16()
    ones = torch.ones(4096, dtype=torch.bfloat16)
    found = functional_call(norm, {"weight": ones}, (x,))
    exact = functional_call(norm, {"weight": ones.double()}, (x.double(),))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last place


def test_the_size_of_the_input_does_not_matter_but_for_eps():
    norm = RMSNorm(8, 1e-12)
    once, thrice = (functional_call(norm, {"weight": WEIGHT}, (X * scale,)) for scale in (1.0, 1000.0))
    torch.testing.assert_close(once, thrice)


def test_zero_stays_zero():
    assert not functional_call(RMSNorm(8, 1e-5), {"weight": WEIGHT}, (torch.zeros_like(X),)).any()


@pytest.mark.parametrize(
    ("options", "kind", "names"),
    [
        ({}, RMSNorm, ["weight"]),
        ({"norm": "layernorm"}, LayerNorm, ["weight"]),
        ({"norm": "layernorm", "bias": True}, LayerNorm, ["weight", "bias"]),
    ],
)
def test_the_config_names_the_norm(options, kind, names):
    norm = build_norm(ModelConfig(dim=16, n_heads=2, **options))
    assert type(norm) is kind and [name for name, _ in norm.named_parameters()] == names
