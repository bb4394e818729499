"""Norms by their formulas, and in fp32 inside whatever the input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

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


def _plain(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _ours(x, weight):
    return functional_call(RMSNorm(weight.shape[0], 1e-5), {"weight": weight}, (x,))


def _sample(rows, width, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, width, rows) if transposed else (2, rows, width)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x, weight = x.mT if transposed else x, torch.randn(width, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(x.shape, generator=generator, dtype=torch.float64)


@settings(deadline=None)
@given(rows=st.integers(0, 5), width=st.integers(1, 9), transposed=st.booleans(), seed=st.integers(0, 99))
def test_rmsnorm_on_the_cpu_is_torchs_in_value_and_gradient(rows, width, transposed, seed):
    x, weight, grad = _sample(rows, width, transposed, seed)
    found, expected = _ours(x, weight), _plain(x, weight)
    assert found.grad_fn.name() == "_FewPassesBackward"
    torch.testing.assert_close(found, expected)
    for wanted in ([x, weight], [x], [weight]):
        a, b = (torch.autograd.grad(y, wanted, grad, retain_graph=True) for y in (found, expected))
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("x_learns", "weight_learns"), [(True, False), (False, True)])
def test_what_is_frozen_gets_no_gradient(x_learns, weight_learns):
    x, weight, grad = _sample(3, 4, False, 0)
    x, weight = x.detach().requires_grad_(x_learns), weight.detach().requires_grad_(weight_learns)
    _ours(x, weight).backward(grad)
    assert (x.grad is not None, weight.grad is not None) == (x_learns, weight_learns)


def test_rmsnorm_has_second_derivatives():
    x, weight, grad = _sample(3, 4, False, 0)

    def curvature(norm):
        first = torch.autograd.grad(norm(x, weight), (x, weight), grad, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), (x, weight))

    torch.testing.assert_close(curvature(_ours), curvature(_plain))


def test_rmsnorm_is_transformed_by_torch_func():
    x, weight, _ = _sample(3, 4, False, 0)
    x, weight = x.detach(), weight.detach()
    grads = [vmap(grad(lambda x, norm=norm: norm(x, weight).square().sum()))(x) for norm in (_ours, _plain)]
    torch.testing.assert_close(*grads)
