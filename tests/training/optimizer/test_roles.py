"""Which parameter decays and which is Muon's: by role, never by shape."""

from __future__ import annotations

import pytest
import torch

from forge.config import SGD, AdamW, Lion, ModelConfig, MoEConfig, Muon, OptimizerConfig, ScheduleFree
from forge.model import build_model, init_params
from forge.training.optimizer import apply_update, build_optimizer, decays, parameter_roles
from forge.training.optimizer.roles import decayed_names, parameter_role


@pytest.mark.parametrize(
    "name,ndim,role",
    [
        ("embed.weight", 2, "embedding"),
        ("position_embed.weight", 2, "embedding"),
        ("transformer.wte.weight", 2, "embedding"),
        ("model.embed_tokens.weight", 2, "embedding"),
        ("head.weight", 2, "head"),
        ("lm_head.weight", 2, "head"),
        ("norm.weight", 1, "vector"),
        ("blocks.0.attn.q_norm.weight", 1, "vector"),
        ("blocks.0.attn.wq.weight", 2, "hidden"),
        ("blocks.0.attn.wq.bias", 1, "vector"),
        ("blocks.0.mlp.experts.w_up", 3, "hidden"),
        ("blocks.0.mlp.experts.bias", 2, "vector"),
        ("blocks.0.mlp.router.weight", 2, "router"),
        ("blocks.0.mlp.shared_gate.weight", 2, "router"),
        ("blocks.0.mlp.w_gate.weight", 2, "hidden"),
    ],
)
def test_role_of_a_name(name, ndim, role):
    assert parameter_role(name, ndim) == role


@pytest.mark.parametrize("tied", [True, False])
def test_in_a_model_decay_acts_on_hidden_matrices_and_the_head_only(tied):
    model = build_model(ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=13, max_seq_len=16, tied_embeddings=tied))
    roles = parameter_roles(model)
    assert decayed_names(roles) == {name for name in roles if name.startswith("blocks.") and "norm" not in name} | (
        set() if tied else {"head.weight"}
    )
    assert not decays(roles["embed.weight"])


def test_experts_are_hidden_and_the_router_is_not():
    config = ModelConfig(
        dim=16, n_layers=1, n_heads=2, vocab_size=13, max_seq_len=16, moe=MoEConfig(n_experts=2, top_k=1)
    )
    roles = parameter_roles(build_model(config))
    assert roles["blocks.0.mlp.router.weight"] == "router"
    assert roles["blocks.0.mlp.experts.w_up"] == roles["blocks.0.mlp.experts.w_down"] == "hidden"


@pytest.mark.parametrize(
    "config",
    [AdamW(weight_decay=0.1), Muon(weight_decay=0.1, adam_lr=1e-2, lr=1e-2), Lion(weight_decay=0.1),
     ScheduleFree(weight_decay=0.1, beta1=1e-6), SGD(weight_decay=0.1)],
)  # fmt: skip
@pytest.mark.parametrize("donate", [False, True])
def test_with_zero_gradients_a_hidden_weight_of_one_becomes_0_999_and_norms_biases_and_embeddings_stay(
    config: OptimizerConfig, donate
):
    names = {
        "blocks.0.attn.wq.weight": (2, 2),
        "norm.weight": (2,),
        "blocks.0.attn.wq.bias": (2,),
        "embed.weight": (3, 2),
    }
    params = {name: torch.ones(shape) for name, shape in names.items()}
    optimizer = build_optimizer(config, parameter_roles(params))
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    params, _ = apply_update(
        optimizer, grads, optimizer.init(params), params,
        lr=torch.tensor(1e-2), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
    )  # fmt: skip
    torch.testing.assert_close(params.pop("blocks.0.attn.wq.weight"), torch.full((2, 2), 0.999), rtol=1e-6, atol=0.0)
    assert all(bool((p == 1.0).all()) for p in params.values())


def test_a_tied_embedding_of_the_model_does_not_decay():
    config = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=13, max_seq_len=16, tied_embeddings=True)
    model = build_model(config)
    params = init_params(model, config, 0)
    optimizer = build_optimizer(AdamW(), parameter_roles(model))
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    after, _ = optimizer.update(grads, optimizer.init(params), params, torch.tensor(1e-2))
    assert torch.equal(after["embed.weight"], params["embed.weight"])
    assert not torch.equal(after["blocks.0.attn.wq.weight"], params["blocks.0.attn.wq.weight"])
