"""FLOPs and parameters from the config alone are those of the real model."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from forge.config import ModelConfig, MoEConfig
from forge.metrics import attention_pairs, count_flops_per_token, count_parameters
from forge.model import build_model, init_params


@st.composite
def _configs(draw, experts: bool = True) -> ModelConfig:
    kv_heads = draw(st.sampled_from([1, 2]))
    n_experts = draw(st.sampled_from([0, 2, 4])) if experts else 0
    n_shared, n_layers = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    return ModelConfig(
        dim=16,
        n_layers=n_layers,
        n_heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8])),
        ffn_hidden_dim=draw(st.sampled_from([8, 24, 40])),
        vocab_size=draw(st.integers(2, 50)),
        max_seq_len=24,
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        mlp=draw(st.sampled_from(["swiglu", "geglu", "gelu", "relu2"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        position=draw(st.sampled_from(["rope", "learned"])),
        tied_embeddings=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 5])),
        attention_backend="math",
        moe=MoEConfig(
            n_experts=n_experts,
            top_k=draw(st.integers(1, max(1, n_experts))),
            n_shared_experts=n_shared,
            shared_expert_gate=draw(st.booleans()) if n_shared else False,
            expert_hidden_dim=draw(st.sampled_from([None, 8, 12])),
            frequency=draw(st.integers(1, min(2, n_layers))),
            aux_loss_weight=0.0,  # the losses of the router have no matmul; the counter must see the objective alone
        ),
    )


def _grouped_mm_flops(left, right, *_, out_shape=None, **__) -> int:
    """(N, K) x (E, K, M), N rows over the experts; or (K, N) x (N, M) -> (E, K, M), the gradient of the weights."""
    return 2 * left[0] * left[1] * right[-1]


def _counted(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward of two sequences, as torch counts them while they run."""
    model = build_model(config)
    params = {name: p.requires_grad_() for name, p in init_params(model, config, 0).items()}
    ids = torch.arange(2 * seq_len).view(2, seq_len) % config.vocab_size
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops})
    with counter:
        functional_call(model, params, (ids,)).square().sum().backward()
    return counter.get_total_flops()


@settings(deadline=None, max_examples=40)
@given(_configs())
def test_parameter_count_is_that_of_the_model(config):
    model, count = build_model(config), count_parameters(config)
    assert count.total == sum(p.numel() for p in model.parameters()) == sum(count.by_part.values())


PARTS = {
    "embedding": ("embed", "position_embed"),
    "attention": (".attn.wq", ".attn.wk", ".attn.wv", ".attn.wo"),
    "mlp": (".mlp.w_",),
    "experts": (".experts.", ".shared."),
    "router": (".router.", ".shared_gate."),
    "norms": ("norm.",),
    "head": ("head.",),
}


@settings(deadline=None, max_examples=40)
@given(_configs())
def test_each_part_is_counted_where_its_name_says(config):
    counted = count_parameters(config).by_part
    found = dict.fromkeys(PARTS, 0)
    for name, parameter in build_model(config).named_parameters():
        part = next(p for p, marks in PARTS.items() if any(mark in name for mark in marks))
        found[part] += parameter.numel()
    assert counted == found


@settings(deadline=None, max_examples=30)
@given(_configs())
def test_active_parameters_leave_out_the_experts_that_a_token_skips(config):
    moe = config.moe
    trimmed = evolve(config, moe=evolve(moe, n_experts=moe.top_k)) if moe.n_experts else config
    idle_router = count_parameters(config).by_part["router"] - count_parameters(trimmed).by_part["router"]
    assert count_parameters(config).active == count_parameters(trimmed).total + idle_router


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_attention_pairs_are_those_of_the_mask(seq_len, window):
    config = ModelConfig(sliding_window=window)
    seen = sum(
        key <= query and (window is None or key > query - window) for query in range(seq_len) for key in range(seq_len)
    )
    assert attention_pairs(config, seq_len) == seen


@settings(deadline=None, max_examples=15)
@given(_configs(), st.integers(1, 24))
def test_flops_are_those_that_torch_counts_in_forward_and_backward(config, seq_len):
    counted = _counted(config, seq_len)
    assert count_flops_per_token(config, seq_len, causal=False) * 2 * seq_len == pytest.approx(counted, rel=1e-12)


def test_a_causal_token_sees_about_half_of_the_square():
    config = ModelConfig(dim=64, n_layers=1, n_heads=4, vocab_size=100)
    causal, square = (count_flops_per_token(config, 100, causal=flag) for flag in (True, False))
    assert square - causal == 12 * 64 * (100 - 101 / 2)  # 12 H head_dim a key, for the keys that the mask hides


def test_a_plain_mlp_has_two_matrices_and_a_gated_one_three():
    plain = ModelConfig(dim=256, n_layers=1, ffn_hidden_dim=1024, mlp="gelu")
    gated = evolve(plain, mlp="geglu")
    narrow = evolve(plain, ffn_hidden_dim=512)
    assert count_flops_per_token(gated, 64) - count_flops_per_token(plain, 64) == 6 * 256 * 1024
    assert count_flops_per_token(plain, 64) - count_flops_per_token(narrow, 64) == 6 * 2 * 256 * 512


def test_experts_cost_their_own_width():
    wide = ModelConfig(dim=64, n_layers=1, ffn_hidden_dim=256, moe=MoEConfig(n_experts=8, top_k=2))
    quarter = evolve(wide, moe=evolve(wide.moe, expert_hidden_dim=64))
    assert count_flops_per_token(wide, 32) - count_flops_per_token(quarter, 32) == 6 * 2 * 3 * 64 * (256 - 64)


def test_grouped_keys_and_values_cost_less():
    full = ModelConfig(dim=64, n_layers=1, n_heads=8)
    grouped = evolve(full, n_kv_heads=2)
    assert count_flops_per_token(full, 32) - count_flops_per_token(grouped, 32) == 6 * 2 * 64 * (64 - 16)
