"""Freezing: a mask over names, a pure function of the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import AdamW, FreezeStage, JobConfig, ModelConfig, MoEConfig, NoSchedule, TrainConfig
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.pytree import tree_norm
from forge.training.freeze import ALIASES, ever_trainable, stage_boundaries, trainable_mask, trainable_names
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_loss_fn
from forge.training.optimizer import build_optimizer, extend, parameter_roles
from forge.training.scheduler import build_scheduler
from forge.training.state import Batch, init_state
from forge.training.step import build_train_step


def _names(**options):
    model = build_model(ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=16, **options))
    return [name for name, _ in model.named_parameters()]


NAMES = _names()


def _stage(*patterns, frozen=True, start_step=0):
    return FreezeStage(patterns, frozen, start_step)


def _frozen(*stages, step=0, names=NAMES):
    return {name for name, trained in trainable_mask(stages, names, step).items() if not trained}


def test_without_stages_everything_is_trained():
    assert trainable_names((), NAMES, 7) == frozenset(NAMES)


def test_a_pattern_freezes_what_it_matches():
    assert _frozen(_stage("blocks.0.*")) == {name for name in NAMES if name.startswith("blocks.0.")}
    assert _frozen(_stage("*.wq.weight", "head.weight")) == {
        "blocks.0.attn.wq.weight", "blocks.1.attn.wq.weight", "head.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    "alias,belongs",
    [
        ("embeddings", lambda name: name == "embed.weight"),
        ("head", lambda name: name == "head.weight"),
        ("norms", lambda name: "norm" in name),
        ("attention", lambda name: ".attn." in name),
        ("mlp", lambda name: ".mlp." in name),
        ("blocks", lambda name: name.startswith("blocks.")),
    ],
)
def test_an_alias_stands_for_the_parameters_of_its_name(alias, belongs):
    expected = {name for name in NAMES if belongs(name)}
    assert expected and _frozen(_stage(alias)) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layernorm", "bias": True, "qkv_bias": True, "position": "learned", "mlp": "gelu"},
        {"qk_norm": True, "moe": MoEConfig(n_experts=2, top_k=1, n_shared_experts=1)},
    ],
)
def test_the_aliases_cover_every_parameter_of_every_kind_of_model(options):
    names = _names(**options)
    parts = [alias for alias in ALIASES if alias not in ("all", "blocks")]
    covered = set().union(*(_frozen(_stage(part), names=names) for part in parts))
    assert covered == set(names)
    assert {name for name in names if "norm" in name} == _frozen(_stage("norms"), names=names)
    frozen = _stage("all"), _stage("embeddings", frozen=False)
    assert trainable_names(frozen, names, 0) == _frozen(_stage("embeddings"), names=names)


@pytest.mark.parametrize(
    "pattern,suggestion",
    [
        ("atention", " (did you mean 'attention'?)"),
        ("head.wieght", " (did you mean 'head.weight'?)"),
        ("layers.*", ""),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(pattern, suggestion):
    with pytest.raises(ConfigError) as caught:
        trainable_mask([_stage(pattern)], NAMES, 0)
    assert str(caught.value) == f"train.freeze: the pattern '{pattern}' matches no parameter{suggestion}"


def test_a_pattern_of_a_stage_still_to_come_is_checked_at_once():
    with pytest.raises(ConfigError, match=r"blocks\.9"):
        trainable_mask([_stage("blocks.9.*", start_step=500)], NAMES, 0)


def test_an_alias_without_parameters_is_an_error_that_does_not_suggest_itself():
    with pytest.raises(ConfigError, match="'head' matches no parameter") as caught:
        trainable_mask([_stage("head")], _names(tied_embeddings=True), 0)
    assert "did you mean 'head'" not in str(caught.value)


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match="no parameter to train at step 3"):
        trainable_mask([_stage("all", start_step=3)], NAMES, 3)
    assert trainable_names([_stage("all", start_step=3)], NAMES, 2) == frozenset(NAMES)


def test_stages_begin_at_their_step_and_the_last_that_matches_decides():
    stages = _stage("blocks"), _stage("blocks.1.*", frozen=False, start_step=10), _stage("norms", start_step=20)
    blocks = {name for name in NAMES if name.startswith("blocks.")}
    first = {name for name in NAMES if name.startswith("blocks.0.")}
    norms = {name for name in NAMES if "norm" in name}
    for step, expected in (
        (0, blocks),
        (9, blocks),
        (10, first),
        (19, first),
        (20, first | norms),
        (999, first | norms),
    ):
        assert _frozen(*stages, step=step) == expected
    assert stage_boundaries(stages) == (0, 10, 20)
    assert stage_boundaries(()) == (0,)


@settings(deadline=None, max_examples=50)
@given(
    starts=st.lists(
        st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from(["blocks", "attention", "norms"])), max_size=4
    ),
    step=st.integers(0, 12),
)
def test_the_mask_changes_at_boundaries_only_and_optimizer_state_covers_all_that_was_trained(starts, step):
    stages = [_stage(pattern, frozen=frozen, start_step=start) for start, frozen, pattern in starts]
    masks = [trainable_names(stages, NAMES, n) for n in range(step + 1)]
    changes = {n for n in range(1, step + 1) if masks[n] != masks[n - 1]}
    assert changes <= set(stage_boundaries(stages))
    assert ever_trainable(stages, iter(NAMES), step) == frozenset().union(*masks)


def test_a_layer_unfrozen_late_gets_its_optimizer_state_then_and_moves_from_then_on():
    stages = _stage("late"), _stage("late", frozen=False, start_step=3)
    params = {"early": torch.ones(2, 2), "late": torch.ones(2, 2)}
    optimizer = build_optimizer(AdamW(), parameter_roles(params))
    state = optimizer.init({name: params[name] for name in trainable_names(stages, params, 0)})
    assert state["mu"].keys() == {"early"}
    for step in range(5):
        trained = trainable_names(stages, params, step)
        if step in stage_boundaries(stages):
            state = extend(optimizer, state, {name: params[name] for name in trained})
        params, state = optimizer.update({name: torch.ones(2, 2) for name in trained}, state, params, torch.tensor(0.1))
        assert bool((params["late"] == 1.0).all()) == (step < 3)
    assert {name: count.item() for name, count in state["count"].items()} == {"early": 5, "late": 2}


@pytest.mark.parametrize("donate", [False, True])
def test_frozen_parameters_keep_their_bits_in_a_step_and_do_not_count_in_the_gradient_norm(donate):
    shape = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=16)
    train = TrainConfig(seq_len=8, grad_clip_norm=0.01, global_batch_size=2, micro_batch_size=2)
    config = JobConfig(model=shape, train=train, scheduler=NoSchedule())
    model = build_model(shape)
    params = init_params(model, shape, 0)
    trained = trainable_names([_stage("blocks.0.*", "embeddings")], params, 0)
    before = {name: p.clone() for name, p in params.items()}
    ids = torch.arange(16).reshape(1, 2, 8) % 13
    loss_fn = build_loss_fn(train, shape)
    _, all_grads = build_value_and_grad(model, loss_fn, vocab_size=13)(params, {}, Batch(ids, ids.flip(-1)))
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    step = build_train_step(
        config,
        value_and_grad=build_value_and_grad(model, loss_fn, vocab_size=13, trainable=trained),
        optimizer=optimizer,
        schedule=build_scheduler(config.scheduler, 10),
        donate=donate,
    )
    state = init_state(params, optimizer.init({name: params[name] for name in trained}))
    state, result = step(state, Batch(ids, ids.flip(-1)))
    torch.testing.assert_close(result.grad_norm, tree_norm({name: all_grads[name] for name in trained}))
    for name in params:
        assert torch.equal(state.params[name], before[name]) == (name not in trained)
