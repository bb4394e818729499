"""Initial weights: the stated value, spread and dtype for each kind of parameter, whatever else there is."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from forge.config import ModelConfig, MoEConfig
from forge.model import build_model, init_params
from forge.model.init import init_tensor, initial_std

CONFIG = ModelConfig(dim=64, n_layers=8, n_heads=4, vocab_size=97, max_seq_len=32, init_std=0.05)
GPT2 = evolve(CONFIG, norm="layernorm", mlp="gelu", bias=True, position="learned")
EXPERTS = evolve(CONFIG, qk_norm=True, moe=MoEConfig(n_experts=4, n_shared_experts=1))


@pytest.mark.parametrize("config", [CONFIG, GPT2, EXPERTS], ids=["llama", "gpt2", "experts"])
def test_norms_are_one_biases_zero_and_matrices_normal(config):
    for name, p in init_params(build_model(config), config, 0).items():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            assert float(p.std()) == pytest.approx(initial_std(name, config), rel=0.2), name
            assert abs(float(p.mean())) < 4 * 0.05 / math.sqrt(p.numel()), name


@pytest.mark.parametrize(
    "name", ["blocks.3.attn.wo.weight", "blocks.3.mlp.w_down.weight", "blocks.3.mlp.experts.w_down"]
)
def test_what_writes_to_the_residual_stream_is_scaled_by_depth(name):
    assert initial_std(name, CONFIG) == pytest.approx(0.05 / 4)
    assert initial_std(name, evolve(CONFIG, n_layers=32)) == pytest.approx(0.05 / 8)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "blocks.0.attn.wq.weight", "blocks.0.mlp.w_up.weight"])
def test_everything_else_is_not(name):
    assert initial_std(name, CONFIG) == initial_std(name, evolve(CONFIG, n_layers=32)) == 0.05


def test_a_parameter_depends_on_seed_and_name_and_no_generator():
    shape = torch.Size((5, 7))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = init_tensor("a.weight", shape, CONFIG, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(init_tensor("a.weight", shape, CONFIG, 0), first)
    assert not torch.equal(init_tensor("b.weight", shape, CONFIG, 0), first)
    assert not torch.equal(init_tensor("a.weight", shape, CONFIG, 1), first)


def test_parameters_come_in_the_dtype_asked_for_rounded_from_the_same_draw():
    model = build_model(CONFIG)
    exact, rounded = init_params(model, CONFIG, 0), init_params(model, CONFIG, 0, dtype=torch.bfloat16)
    assert all(torch.equal(p.bfloat16(), rounded[name]) for name, p in exact.items())


def test_the_model_itself_is_left_on_the_meta_device():
    model = build_model(CONFIG)
    init_params(model, CONFIG, 0)
    assert all(p.device.type == "meta" for p in model.parameters())
