"""Muon: an orthogonal step for each hidden matrix, AdamW for the rest."""

from __future__ import annotations

import pytest
import torch

from forge.config import AdamW, ModelConfig, Muon
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.training.optimizer import apply_update, build_optimizer, parameter_roles
from forge.training.optimizer.muon import muon_scale

LR = torch.tensor(0.02)


def _update(config, params, grads, *, lr=LR, donate=False, updates=1):
    optimizer = build_optimizer(config, parameter_roles(params))
    params, state = {name: p.clone() for name, p in params.items()}, optimizer.init(params)
    for _ in range(updates):
        params, state = apply_update(
            optimizer, {name: g.clone() for name, g in grads.items()}, state, params,
            lr=lr, scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
        )  # fmt: skip
    return params, state


def _matrix(rows, cols, least=0.3):
    """Random with singular values from `least` to 1."""
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols), full_matrices=False)
    return u * torch.linspace(1.0, least, min(rows, cols)) @ vh


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scaling,theirs", [("spectral", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_torchs_muon_where_both_iterate_to_the_polar_factor(shape, scaling, theirs, nesterov, donate):
    config = Muon(nesterov=nesterov, scaling=scaling, ns_steps=12, momentum=0.5, weight_decay=0.1)
    params = {"blocks.0.w.weight": torch.randn(shape)}
    optimizer = build_optimizer(config, parameter_roles(params))
    copy = params["blocks.0.w.weight"].clone().requires_grad_()
    reference = torch.optim.Muon(
        [copy], lr=0.02, weight_decay=0.1, momentum=0.5, nesterov=nesterov,
        ns_coefficients=(1.875, -1.25, 0.375), ns_steps=10, adjust_lr_fn=theirs,
    )  # fmt: skip
    state = optimizer.init(params)
    first = _matrix(*shape)
    for update in range(3):
        grads = {"blocks.0.w.weight": first + 0.05 * update * torch.randn(shape)}
        copy.grad = grads["blocks.0.w.weight"].clone()
        reference.step()
        params, state = apply_update(
            optimizer, grads, state, params, lr=LR, scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate
        )
    # torch iterates in bf16: 3 steps of 0.02, each entry off by less than 2 %.
    torch.testing.assert_close(params["blocks.0.w.weight"], copy.detach(), rtol=0.0, atol=1.6e-3)


@pytest.mark.parametrize("nesterov", [False, True])
def test_second_update_is_the_polar_factor_of_the_momentum_or_its_lookahead(nesterov):
    config = Muon(nesterov=nesterov, ns_steps=14, weight_decay=0.0)
    weight, g1, g2 = torch.zeros(4, 4), _matrix(4, 4), _matrix(4, 4)
    optimizer = build_optimizer(config, {"w": "hidden"})
    params, state = optimizer.update({"w": g1}, optimizer.init({"w": weight}), {"w": weight}, LR)
    after, _ = optimizer.update({"w": g2}, state, params, LR)
    momentum = 0.95 * 0.05 * g1 + 0.05 * g2
    u, _, vh = torch.linalg.svd(0.95 * momentum + 0.05 * g2 if nesterov else momentum)
    torch.testing.assert_close(after["w"], params["w"] - LR * (u @ vh), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 6), (6, 24), (12, 12)])
@pytest.mark.parametrize("rank", [12, 2])
@pytest.mark.parametrize("donate", [False, True])
def test_singular_values_of_the_applied_update_lie_in_0_6_to_1_3(shape, rank, donate):
    full = _matrix(*shape, least=0.01)
    u, s, vh = torch.linalg.svd(full, full_matrices=False)
    grad = u[:, :rank] * s[:rank] @ vh[:rank]
    params = {"blocks.0.w.weight": torch.zeros(shape)}
    after, _ = _update(Muon(), params, {"blocks.0.w.weight": grad}, donate=donate)
    values = torch.linalg.svdvals(after["blocks.0.w.weight"]) / LR / muon_scale(shape, "spectral")
    kept = min(rank, *shape)
    assert values[:kept].min() >= 0.6 and values.max() <= 1.3
    assert (values[kept:] < 1e-2).all()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("scaling", ["spectral", "rms"])
@pytest.mark.parametrize("shape", [(8, 4), (4, 8)])
def test_an_expert_tensor_is_as_many_separate_matrices_of_in_by_out(shape, scaling, donate):
    experts, grads = torch.randn(3, *shape), torch.randn(3, *shape)
    config = Muon(scaling=scaling)
    together, _ = _update(config, {"mlp.experts.w_up": experts}, {"mlp.experts.w_up": grads}, donate=donate, updates=3)
    apart, _ = _update(
        config,
        {f"mlp.{i}.weight": expert.T for i, expert in enumerate(experts)},
        {f"mlp.{i}.weight": grad.T for i, grad in enumerate(grads)},
        donate=donate,
        updates=3,
    )
    torch.testing.assert_close(together["mlp.experts.w_up"], torch.stack(list(apart.values())).mT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_head_and_norms_are_adamws_with_its_own_lr_on_muons_schedule(tied, donate):
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=13, max_seq_len=16, tied_embeddings=tied)
    model = build_model(config)
    params = init_params(model, config, 0)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    muon = Muon(lr=0.02, adam_lr=1e-3, adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.2)
    halfway = torch.tensor(0.01)  # the schedule is at one half
    after, state = _update(muon, params, grads, lr=halfway, donate=donate, updates=3)
    adamw = AdamW(beta1=0.8, beta2=0.9, weight_decay=0.2)
    expected, _ = _update(adamw, params, grads, lr=torch.tensor(5e-4), updates=3)
    rest = {name for name in params if "blocks" not in name or "norm" in name}
    assert {"embed.weight", "norm.weight", "blocks.0.attn_norm.weight"} <= rest and ("head.weight" in rest) != tied
    assert state["momentum"].keys() == params.keys() - rest and state["mu"].keys() == rest
    for name in rest:
        torch.testing.assert_close(after[name], expected[name], rtol=1e-5, atol=1e-6)
    moved = after["blocks.0.attn.wq.weight"] - params["blocks.0.attn.wq.weight"]
    assert moved.norm() > 0.02  # three orthogonal steps of 0.01, 16 x 16


def test_scale_of_each_shape():
    assert muon_scale((8, 2), "spectral") == 2.0
    assert muon_scale((2, 8), "spectral") == 1.0
    assert muon_scale((4, 100), "rms") == muon_scale((100, 4), "rms") == pytest.approx(2.0)


def test_a_zero_lr_with_an_adam_lr_is_refused_since_the_one_drives_the_other():
    with pytest.raises(ConfigError, match="adam_lr"):
        build_optimizer(Muon(lr=0.0), {"w": "hidden"})
    build_optimizer(Muon(lr=0.0, adam_lr=0.0), {"w": "hidden"})
