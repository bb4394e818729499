"""muP: nothing changes at the base width, and activations move alike at every other."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch.func import functional_call

from forge.config import SGD, AdamW, JobConfig, Lion, ModelConfig, MoEConfig, Muon, NoSchedule, ScheduleFree
from forge.data import Batch
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.model.init import initial_std
from forge.pytree import tree_equal
from forge.training import build_loss_fn, build_optimizer, build_scheduler, build_train_step, build_value_and_grad
from forge.training.capture import capture
from forge.training.optimizer import apply_update, parameter_roles
from forge.training.optimizer.width import lr_factor
from forge.training.state import init_state

BASE = ModelConfig(dim=32, n_layers=2, head_dim=16, ffn_hidden_dim=64, vocab_size=61, max_seq_len=1024, init_std=0.1)
IDS = torch.randint(61, (1, 4, 17), generator=torch.Generator().manual_seed(0))
BATCH = Batch(IDS[..., :-1], IDS[..., 1:])
SITES = ["blocks.*.attn", "blocks.*.mlp.w_up", "blocks.*", "head"]
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2),
    "lion": Lion(lr=3e-3),
    "schedule_free": ScheduleFree(lr=1e-2),
    "muon": Muon(lr=0.1, adam_lr=1e-2),
    "muon rms": Muon(lr=0.01, adam_lr=1e-2, scaling="rms"),
    "sgd": SGD(lr=0.3),
}


def _widened(times, mup=True, **others):
    wide = evolve(BASE, dim=32 * times, ffn_hidden_dim=64 * times, **others)
    return evolve(wide, mup_base_dim=32 if mup else None)


def _trained(model_config, optimizer_config, steps):
    """The model, and its parameters before and after some steps on one batch."""
    config = JobConfig(model=model_config, optimizer=optimizer_config, scheduler=NoSchedule())
    model = build_model(model_config)
    params = init_params(model, model_config, seed=0)
    optimizer = build_optimizer(optimizer_config, parameter_roles(model), width=model_config.width_multiplier)
    seam = build_value_and_grad(model, build_loss_fn(config.train, model_config), vocab_size=61)
    step = build_train_step(
        config, value_and_grad=seam, optimizer=optimizer, schedule=build_scheduler(config.scheduler, steps)
    )
    state = init_state(params, optimizer.init(params))
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return model, params, state.params


def _moved(model_config, optimizer_config, sites=SITES):
    """Site -> mean absolute change of its activations over four steps."""
    model, before, after = _trained(model_config, optimizer_config, 4)
    with torch.no_grad():
        old, new = (capture(model, params, BATCH.input_ids[0], sites) for params in (before, after))
    return {site: float((new[site] - old[site]).abs().mean()) for site in old}


def _growth(optimizer_config, mup):
    """Site -> how many times more its activations move in a model eight times as wide."""
    narrow, wide = (_moved(_widened(times, mup), optimizer_config) for times in (1, 8))
    return {site: wide[site] / narrow[site] for site in narrow}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_mup_activations_move_alike_at_every_width(name):
    growth = _growth(OPTIMIZERS[name], mup=True)
    assert all(1 / 2.5 < times < 2.5 for times in growth.values()), growth


@pytest.mark.parametrize("name", ["adamw", "lion", "schedule_free", "muon rms"])
def test_without_it_they_move_more_the_wider_the_model(name):
    growth = _growth(OPTIMIZERS[name], mup=False)
    assert max(growth.values()) > 4, growth


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_the_base_width_mup_changes_no_bit(name):
    plain, mup = (_trained(evolve(BASE, mup_base_dim=base), OPTIMIZERS[name], 2) for base in (None, 32))
    assert tree_equal(plain[2], mup[2])


HIDDEN, ROUTER = "blocks.0.mlp.w_up.weight", "blocks.0.mlp.router.weight"
VECTOR, QK = "norm.weight", "blocks.0.attn.q_norm.weight"


@pytest.mark.parametrize(
    "config,factors",  # at four times the width: hidden, router, embedding, head, vector, norm of the heads
    [
        (AdamW(), (1 / 4, 1 / 4, 1, 1, 1, 1)),
        (Lion(), (1 / 4, 1 / 4, 1, 1, 1, 1)),
        (ScheduleFree(), (1 / 4, 1 / 4, 1, 1, 1, 1)),
        (Muon(), (1, 1 / 4, 1, 1, 1, 1)),
        (Muon(scaling="rms"), (1 / 2, 1 / 4, 1, 1, 1, 1)),
        (SGD(), (1, 1 / 4, 4, 4, 4, 1)),
    ],
)
def test_learning_rates_follow_the_table(config, factors):
    names = (HIDDEN, ROUTER, "embed.weight", "head.weight", VECTOR, QK)
    roles = ("hidden", "router", "embedding", "head", "vector", "vector")
    found = tuple(lr_factor(config, name, role, 4.0) for name, role in zip(names, roles, strict=True))
    assert found == factors


@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("donate", [False, True])
def test_decay_does_not_depend_on_the_width(config, donate):
    params = {HIDDEN: torch.ones(2, 2), ROUTER: torch.ones(2, 2), "head.weight": torch.ones(2, 2)}
    config = evolve(config, weight_decay=0.1, **({"adam_lr": config.lr} if isinstance(config, Muon) else {}))
    config = evolve(config, beta1=1e-6) if isinstance(config, ScheduleFree) else config
    optimizer = build_optimizer(config, parameter_roles(params), width=4.0)
    grads = {name: torch.zeros_like(p) for name, p in params.items()}
    after, _ = apply_update(
        optimizer, grads, optimizer.init(params), params,
        lr=torch.tensor(1e-2), scale=torch.tensor(1.0), ok=torch.tensor(True), donate=donate,
    )  # fmt: skip
    for name, p in after.items():
        torch.testing.assert_close(p, torch.full((2, 2), 0.999), rtol=1e-6, atol=0.0, msg=name)


@pytest.mark.parametrize(
    "name,std",  # init_std 0.1, two layers, four times the width
    [
        ("embed.weight", 0.1),
        ("head.weight", 0.1),
        ("blocks.0.attn.wq.weight", 0.05),
        ("blocks.0.attn.wo.weight", 0.025),
        ("blocks.0.mlp.experts.w_down", 0.025),
        ("blocks.0.mlp.experts.w_up", 0.05),
        ("blocks.0.mlp.router.weight", 0.025),
        ("blocks.0.mlp.shared_gate.weight", 0.025),
    ],
)
def test_initial_weights_follow_the_table(name, std):
    assert initial_std(name, _widened(4)) == pytest.approx(std)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_standard_model_over_the_width_before_the_cap(tied):
    config = _widened(4, tied_embeddings=tied, logit_softcap=0.5)
    plain = evolve(config, mup_base_dim=None, logit_softcap=None)
    params = init_params(build_model(config), config, seed=0)
    with torch.no_grad():
        ours, standard = (functional_call(build_model(c), params, (BATCH.input_ids[0],)) for c in (config, plain))
    torch.testing.assert_close(ours, 0.5 * torch.tanh(standard / 4 / 0.5))


def test_wider_heads_have_smaller_scores_and_agree_at_the_base():
    wide = ModelConfig(dim=256, n_heads=4, mup_base_dim=64)  # heads of 64, 16 at the base
    assert wide.attention_scale == pytest.approx(4 / 64)
    assert evolve(wide, dim=64).attention_scale is None
    assert evolve(wide, head_dim=64).attention_scale is None  # what is given is so at every width
    assert ModelConfig(dim=256, n_heads=4).attention_scale is None


def test_captured_attention_has_the_scale_that_the_model_has():
    config = evolve(BASE, dim=64, head_dim=None, n_heads=1, mup_base_dim=4)
    model = build_model(config)
    params = init_params(model, config, seed=0)
    sites = ["blocks.0.attn.weights", "blocks.0.attn.wv", "blocks.0.attn.wo"]
    with torch.no_grad():
        weights, v, out = capture(model, params, BATCH.input_ids[0], sites).values()
    weights, v = (weights, v) if weights.dim() == 4 else (v, weights)
    torch.testing.assert_close(weights[:, 0] @ v @ params["blocks.0.attn.wo.weight"].T, out, rtol=1e-4, atol=1e-6)


def test_experts_move_alike_too():
    moe = MoEConfig(n_experts=4, top_k=4, n_shared_experts=1, shared_expert_gate=True)
    models = (_widened(times, moe=evolve(moe, expert_hidden_dim=32 * times)) for times in (1, 8))
    narrow, wide = (
        _moved(model, OPTIMIZERS["adamw"], ["blocks.*.mlp.experts", "blocks.*", "head"]) for model in models
    )
    assert all(1 / 2.5 < wide[site] / narrow[site] < 2.5 for site in narrow), (narrow, wide)


def test_a_base_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"model\.mup_base_dim = 30 .* model\.n_heads = 4"):
        ModelConfig(dim=64, n_heads=4, mup_base_dim=30)
