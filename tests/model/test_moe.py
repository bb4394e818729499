"""Mixture of experts: equal to a plain loop over tokens, balanced by what the papers say, and free of side effects."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from forge.config import JobConfig, ModelConfig, MoEConfig, TrainConfig
from forge.model import build_model, init_params
from forge.model.mlp import ACTIVATIONS
from forge.model.moe import MoE, balanced_bias
from forge.model.recompute import apply_activation_checkpointing
from forge.training.extras import balance_routers, init_extras
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_loss_fn
from forge.training.state import Batch


def _config(**moe) -> ModelConfig:
    return ModelConfig(
        dim=8, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=16, ffn_hidden_dim=16, init_std=0.3,
        moe=MoEConfig(n_experts=4, **moe),
    )  # fmt: skip


def _layer(config: ModelConfig, seed: int = 0):
    layer = MoE(config)
    params = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i)) * 0.5
        for i, (name, p) in enumerate(layer.named_parameters())
    }
    return layer, params


def _by_hand(config: ModelConfig, params, x, bias=None):
    """One token at a time, one expert at a time."""
    act, rows = ACTIVATIONS[config.mlp], []
    for token in x.reshape(-1, x.shape[-1]):
        logits = params["router.weight"] @ token
        scores = logits.softmax(0) if config.moe.router == "softmax" else logits.sigmoid()
        chosen = (scores + (0 if bias is None else bias)).topk(config.moe.top_k).indices
        out = torch.zeros_like(token)
        for e in chosen:
            up, down = params["experts.w_up"][e], params["experts.w_down"][e]
            hidden = act(token @ params["experts.w_gate"][e]) * (token @ up)
            whole = scores[chosen].sum() if config.moe.norm_topk_prob else 1
            out += scores[e] / whole * (hidden @ down)
        if config.moe.n_shared_experts:
            gate, up, down = (params[f"shared.{name}.weight"] for name in ("w_gate", "w_up", "w_down"))
            weight = (params["shared_gate.weight"] @ token).sigmoid() if config.moe.shared_expert_gate else 1
            out += weight * (down @ (act(gate @ token) * (up @ token)))
        rows.append(out)
    return torch.stack(rows).view_as(x)


@settings(deadline=None, max_examples=20)
@given(
    router=st.sampled_from(["softmax", "sigmoid"]),
    top_k=st.integers(1, 4),
    shared=st.integers(0, 2),
    gated=st.booleans(),
    normed=st.booleans(),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_grouped_experts_equal_a_loop_over_tokens(router, top_k, shared, gated, normed, tokens, seed):
    config = _config(
        router=router,
        top_k=top_k,
        n_shared_experts=shared,
        shared_expert_gate=gated and shared > 0,
        norm_topk_prob=normed,
    )
    layer, params = _layer(config, seed)
    x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(seed))
    out, stats = functional_call(layer, params, (x,))
    torch.testing.assert_close(out, _by_hand(config, params, x), rtol=1e-4, atol=1e-5)
    assert int(stats.counts.sum()) == tokens * top_k and int(stats.dropped) == 0


def test_the_bias_selects_but_does_not_weigh():
    config = _config(router="sigmoid")
    layer, params = _layer(config)
    x, bias = torch.randn(1, 6, 8), torch.tensor([5.0, -5.0, 5.0, -5.0])
    out, stats = functional_call(layer, params, (x, bias))
    torch.testing.assert_close(out, _by_hand(config, params, x, bias), rtol=1e-4, atol=1e-5)
    assert stats.counts.tolist() == [6, 0, 6, 0]


def test_a_balanced_router_has_an_auxiliary_loss_of_its_weight():
    config = _config(aux_loss_weight=0.5, top_k=4)
    layer, params = _layer(config)
    params["router.weight"].zero_()
    _, stats = functional_call(layer, params, (torch.randn(1, 8, 8),))
    assert float(stats.loss) == pytest.approx(0.5)


def test_the_entropy_is_summed_over_the_tokens_and_has_no_gradient():
    for router, logit in (("softmax", math.log(3)), ("sigmoid", 0.0)):
        layer, params = _layer(_config(router=router))
        params["router.weight"].zero_().requires_grad_()
        x = torch.zeros(1, 5, 8)
        _, even = functional_call(layer, params, (x,))
        assert float(even.entropy) == pytest.approx(5 * math.log(4)) and not even.entropy.requires_grad
        with torch.no_grad():
            params["router.weight"][0, 0] = logit
        _, skewed = functional_call(layer, params, (torch.ones(1, 5, 8),))
        p = [math.exp(logit) / (math.exp(logit) + 3), *[1 / (math.exp(logit) + 3)] * 3]
        assert float(skewed.entropy) == pytest.approx(-5 * sum(q * math.log(q) for q in p))


def test_the_router_z_loss_is_the_mean_square_of_the_log_sum_exp():
    config = _config(aux_loss_weight=0.0, router_z_loss_weight=1.0)
    layer, params = _layer(config)
    params["router.weight"].zero_()
    _, stats = functional_call(layer, params, (torch.randn(1, 8, 8),))
    assert float(stats.loss) == pytest.approx(math.log(4) ** 2, rel=1e-5)


@pytest.mark.parametrize("normed", [True, False])
def test_scores_that_all_underflow_are_no_division_of_zero_by_zero(normed):
    layer, params = _layer(_config(router="sigmoid", norm_topk_prob=normed, aux_loss_weight=0.1))
    params["router.weight"] = torch.full_like(params["router.weight"], -100.0)

    def loss(params, x):
        out, stats = functional_call(layer, params, (x,))
        return out.square().sum() + stats.loss

    gradient = torch.func.grad(loss)(params, torch.ones(1, 4, 8))
    assert all(grad.isfinite().all() for grad in gradient.values())


def test_capacity_keeps_the_earliest_tokens_over_all_slots_together():
    config = _config(router="sigmoid", top_k=1, capacity_factor=1.0)
    layer, params = _layer(config)
    x, bias = torch.randn(1, 8, 8), torch.tensor([9.0, 0.0, 0.0, 0.0])  # all to expert 0, whose capacity is 2
    out, stats = functional_call(layer, params, (x, bias))
    assert int(stats.dropped) == 6 and stats.counts.tolist() == [8, 0, 0, 0]
    torch.testing.assert_close(out[:, :2], _by_hand(config, params, x, bias)[:, :2], rtol=1e-4, atol=1e-5)
    assert not out[:, 2:].any()


def test_the_bias_moves_towards_equal_loads():
    moved = balanced_bias(torch.zeros(4), torch.tensor([10, 0, 5, 5]), 0.1)
    torch.testing.assert_close(moved, torch.tensor([-0.1, 0.1, 0.0, 0.0]))


def _seam(config: ModelConfig, checkpointing: bool = False):
    model = build_model(config)
    if checkpointing:
        apply_activation_checkpointing(model)
    return build_value_and_grad(model, build_loss_fn(TrainConfig(), config), vocab_size=13)


def _batch(accumulation: int, repeat: bool = False) -> Batch:
    ids = torch.randint(0, 13, (1, 4, 6), generator=torch.Generator().manual_seed(0))
    if repeat:
        ids = ids[:, :1].expand(1, 4, 6)
    ids = ids.reshape(accumulation, -1, 6)
    return Batch(ids, ids.roll(-1, -1))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_checkpointing_moves_neither_loss_nor_counts(router):
    config = _config(router=router)
    params, extras = init_params(build_model(config), config, 0), init_extras(config)
    plain, checkpointed = (_seam(config, c)(params, extras, _batch(2)) for c in (False, True))
    torch.testing.assert_close(checkpointed[1], plain[1])
    assert all(torch.equal(plain[0].router_counts[i], checkpointed[0].router_counts[i]) for i in ("0", "1"))


def test_auxiliary_losses_weigh_the_same_in_one_or_four_micro_batches():
    config = _config(aux_loss_weight=0.7)
    params = init_params(build_model(config), config, 0)
    one, four = (_seam(config)(params, {}, _batch(a, repeat=True)) for a in (1, 4))
    torch.testing.assert_close(four[0].aux, one[0].aux, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(four[1], one[1], rtol=1e-4, atol=1e-6)
    assert float(one[0].aux) > 0


def test_counts_are_those_of_the_global_batch():
    config = _config(router="sigmoid")
    params, extras = init_params(build_model(config), config, 0), init_extras(config)
    one, four = (_seam(config)(params, extras, _batch(a))[0].router_counts for a in (1, 4))
    assert all(torch.equal(one[i], four[i]) for i in one)
    good = torch.tensor(True)
    moved = balance_routers(extras, one, good, 0.1)["router_bias"]["0"]
    assert moved.abs().max() == pytest.approx(0.1)
    still = balance_routers(extras, one, ~good, 0.1)["router_bias"]["0"]
    assert not still.any()


def test_every_nth_layer_has_experts():
    config = evolve(_config(frequency=2), n_layers=4)
    names = dict(build_model(config).named_parameters())
    assert [f"blocks.{i}.mlp.router.weight" in names for i in range(4)] == [False, True, False, True]


def test_all_labels_ignored_gives_zero_loss_with_experts_too():
    config = _config()
    batch = _batch(2)
    batch = Batch(batch.input_ids, torch.full_like(batch.labels, -100))
    sums, grads = _seam(config)(init_params(build_model(config), config, 0), {}, batch)
    assert float(sums.total) == 0.0 and all(not g.any() for g in grads.values())


def test_the_small_moe_preset_is_a_job():
    from pathlib import Path

    from forge.config import load_config

    config = load_config(Path(__file__).parents[2] / "configs" / "moe_small.toml")
    assert isinstance(config, JobConfig) and config.model.is_moe_layer(0)
