"""Held-out loss: weighted by tokens, finite, the same every time."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from forge.config import ModelConfig, MoEConfig, TrainConfig
from forge.data.batch import IGNORE, Batch
from forge.errors import DataError
from forge.model import build_model, init_params
from forge.pytree import tree_clone, tree_equal
from forge.training.eval import EvalSet, build_eval_step, perplexity, run_eval, run_eval_sets
from forge.training.loss import LossSums, build_eval_loss_fn

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=13, max_seq_len=16)


def _sums(ce: float, tokens: int) -> LossSums:
    zero = torch.zeros(())
    return LossSums(total=zero, ce=torch.tensor(ce), z=zero, aux=zero, tokens=torch.tensor(tokens))


def test_loss_is_weighted_by_tokens_and_perplexity_is_its_exponential():
    answers = iter([_sums(2.0, 1), _sums(12.0, 3)])
    metrics = run_eval(lambda *_: next(answers), {}, {}, [None, None], bytes_per_token=2.0)
    assert metrics["eval/loss"] == pytest.approx(3.5)
    assert metrics["eval/perplexity"] == pytest.approx(33.1155, abs=1e-4)
    assert metrics["eval/bits_per_byte"] == pytest.approx(3.5 / math.log(2) / 2)
    assert metrics["eval/tokens"] == 4


def test_a_huge_loss_has_infinite_perplexity():
    assert perplexity(800.0) == math.inf
    assert run_eval(lambda *_: _sums(800.0, 1), {}, {}, [None])["eval/perplexity"] == math.inf


def test_a_set_without_targets_is_refused():
    with pytest.raises(DataError, match="no target token"):
        run_eval(lambda *_: _sums(0.0, 0), {}, {}, [None])


def _evaluate(*sets):
    """Sets whose batches are (summed loss, tokens)."""
    return run_eval_sets(lambda p, e, batch: _sums(*batch), {}, {}, sets, place=lambda batch: batch)


def test_sets_are_reported_by_name_and_the_held_out_ones_together_by_tokens():
    web, code = EvalSet("web", [(2.0, 1), (4.0, 1)], 2.0), EvalSet("code", [(6.0, 6)], 4.0)
    found = _evaluate(web, code, EvalSet("far", [(50.0, 5)], held_out=False))
    assert (found["eval/web/loss"], found["eval/code/loss"], found["eval/far/loss"]) == (3.0, 1.0, 10.0)
    assert (found["eval/loss"], found["eval/tokens"]) == (12 / 8, 8)
    assert found["eval/perplexity"] == pytest.approx(math.exp(1.5))
    assert found["eval/bits_per_byte"] == pytest.approx(12 / math.log(2) / (2 * 2.0 + 6 * 4.0))
    assert found["eval/code/bits_per_byte"] == pytest.approx(1 / math.log(2) / 4)
    assert "eval/far/bits_per_byte" not in found


def test_one_set_is_the_evaluation_and_without_a_name_it_has_no_other():
    assert set(_evaluate(EvalSet("", [(2.0, 1)]))) == {"eval/loss", "eval/perplexity", "eval/tokens"}
    found = _evaluate(EvalSet("far", [(2.0, 1)], held_out=False))
    assert found["eval/loss"] == found["eval/far/loss"] == 2.0
    found = _evaluate(EvalSet("", [(2.0, 1)]), EvalSet("far", [(5.0, 1)], held_out=False))
    assert (found["eval/loss"], found["eval/far/loss"]) == (2.0, 5.0)


def _batch(seed: int, sequences: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (1, sequences, 8), generator=generator)
    labels = torch.randint(0, 13, ids.shape, generator=generator)
    labels[torch.rand(ids.shape, generator=generator) < 0.3] = IGNORE
    return Batch(ids, labels)


def test_evaluation_is_cross_entropy_alone_in_any_batching():
    model = build_model(MODEL)
    params = init_params(model, MODEL, 0)
    train = TrainConfig(z_loss_weight=1.0, label_smoothing=0.2)
    step = build_eval_step(model, build_eval_loss_fn(train, MODEL), vocab_size=13)
    whole = _batch(0, 5)
    parts = [Batch(whole.input_ids[:, a:b], whole.labels[:, a:b]) for a, b in ((0, 2), (2, 4), (4, 5))]
    together, apart = run_eval(step, params, {}, [whole]), run_eval(step, params, {}, parts)
    assert together["eval/loss"] == pytest.approx(apart["eval/loss"], rel=1e-5)
    logits = torch.func.functional_call(model, params, (whole.input_ids[0],))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.labels.flatten(), ignore_index=IGNORE)
    assert together["eval/loss"] == pytest.approx(float(expected), rel=1e-5)


def test_experts_take_every_token_of_an_evaluation():
    free = evolve(MODEL, moe=MoEConfig(n_experts=4, top_k=1))
    tight = evolve(free, moe=evolve(free.moe, capacity_factor=0.25))
    params, losses = init_params(build_model(free), free, 0), []
    for config in (free, tight):
        step = build_eval_step(model := build_model(config), build_eval_loss_fn(TrainConfig(), config), vocab_size=13)
        losses.append(run_eval(step, params, {}, [_batch(0, 4)])["eval/loss"])
        assert model.blocks["0"].mlp.capacity_factor == config.moe.capacity_factor
    assert losses[0] == losses[1]


def test_evaluation_touches_neither_parameters_nor_rng_nor_mode():
    model = build_model(MODEL)
    params = init_params(model, MODEL, 0)
    before, rng = tree_clone(params), torch.get_rng_state()
    step = build_eval_step(model, build_eval_loss_fn(TrainConfig(), MODEL), vocab_size=13)
    first = run_eval(step, params, {}, [_batch(0, 2)])
    assert first == run_eval(step, params, {}, [_batch(0, 2)])
    assert tree_equal(params, before) and torch.equal(torch.get_rng_state(), rng) and model.training
