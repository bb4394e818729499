"""A pipeline of any schedule trains the same model to the same losses as one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import DistributedConfig, FreezeStage
from forge.distributed.pipeline import check_pipeline, stage_layers
from forge.errors import ConfigError
from forge.pytree import tree_leaves
from forge.training.parts import build_parts, initial_state, seam_for
from forge.training.runtime import build_runtime, open_runtime
from tests.distributed.parity import assert_same_curve
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    AVERAGED,
    FREE,
    JOB,
    MODEL,
    MOE,
    TRAIN,
    Curve,
    evaluate,
    global_batch,
    local_batch,
    train,
)

TIED = evolve(MODEL, tied_embeddings=True)
FROZEN = (FreezeStage(("blocks.*", "embed*")), FreezeStage(("blocks.1.*",), frozen=False, start_step=3))
JOBS = {
    "tied": evolve(JOB, model=TIED),
    "five layers": evolve(JOB, model=evolve(MODEL, n_layers=5)),
    "five tied layers": evolve(JOB, model=evolve(TIED, n_layers=5)),
    "moe": evolve(JOB, model=MOE),
    "learned positions": evolve(JOB, model=evolve(MODEL, position="learned")),
    "recomputed": evolve(JOB, train=evolve(TRAIN, activation_checkpointing="full")),
    "selectively recomputed": evolve(JOB, train=evolve(TRAIN, activation_checkpointing="selective")),
    "first stage frozen at first": evolve(JOB, train=evolve(TRAIN, freeze=FROZEN)),
    "bf16": evolve(JOB, train=evolve(TRAIN, precision="bf16")),
}
F1B1, GPIPE, LOOPED, ZERO = ({"pp": 2, "pp_schedule": s} for s in ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"))
FREED = {"reshard_after_forward": "always", "prefetch_blocks": 1}
ZERO_TWICE = ZERO | {"pp_virtual_stages": 2}
CASES = {
    2: [
        ("moe", F1B1), ("moe", ZERO_TWICE), ("five layers", ZERO_TWICE), ("recomputed", ZERO),
        ("learned positions", GPIPE), ("first stage frozen at first", ZERO),
        ("bf16", F1B1), ("selectively recomputed", LOOPED),
    ],
    4: [
        ("tied", ZERO), ("moe", LOOPED | FREED), ("five tied layers", F1B1 | {"pp": 4}),
    ],
}  # fmt: skip


class _Found(NamedTuple):
    """What one rank has made of everything asked of it."""

    curves: list[Curve]
    sums: dict[str, Any]
    evaluated: list[list[float]]


def _everything(world_size):
    """All that is asked of one number of ranks, in one start of them."""
    curves = [train(JOBS[job], layout) for job, layout in CASES[world_size]]
    if world_size > 2:
        return _Found(curves, {}, [])
    evaluated = [evaluate(_staged(FREE, F1B1), 1), evaluate(_staged(FREE, LOOPED), 5)]
    evaluated.append(evaluate(_staged(AVERAGED, LOOPED), 5))
    return _Found(curves, _first_sums(_staged(JOBS["moe"], F1B1)), evaluated)


@pytest.fixture(scope="module")
def found():
    return {world_size: run_ranks(_everything, world_size, world_size) for world_size in CASES}


@pytest.fixture(scope="module")
def alone():
    return {name: train(job) for name, job in JOBS.items()}


@pytest.mark.parametrize(
    ("world_size", "index"),
    [
        pytest.param(w, i, id=f"{job}-{w} ranks-{'-'.join(map(str, layout.values()))}")
        for w, cases in CASES.items()
        for i, (job, layout) in enumerate(cases)
    ],
)
def test_a_pipeline_does_not_change_the_training(world_size, index, found, alone):
    job = CASES[world_size][index][0]
    bounds = {"losses": 2e-2, "norms": 1e-1, "params": 5e-2} if job == "bf16" else {}
    for rank in range(world_size):
        assert_same_curve(found[world_size][rank].curves[index], alone[job], **bounds)


def _first_sums(job):
    """Total and counts of one batch, with and without its documents, and the squared norm of its gradient."""
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state = initial_state(job, parts)
        seam = seam_for(job, parts)
        batch = local_batch(global_batch(0), runtime.data_rank, runtime.data_ranks, 1)
        joined, _ = seam(state.params, state.extras, evolve(batch, doc_ids=None))
        packed, grads = seam(state.params, state.extras, batch)
        doubled, _ = seam({name: 2 * p for name, p in state.params.items()}, state.extras, batch)
        left = [p.grad for p in parts.model.parameters() if p.grad is not None]
        return {
            "joined": float(joined.total),
            "packed": float(packed.total),
            "doubled": float(doubled.total),
            "aux": float(packed.aux),
            "counts": packed.router_counts,
            "entropy": float(packed.router_entropy),
            "names": sorted(grads),
            "held": sum(p.numel() for p in tree_leaves(state.params)),
            "left": left,
        }


def _staged(job, layout):
    return evolve(job, distributed=DistributedConfig(**layout))


@pytest.fixture(scope="module")
def stages(found):
    return [rank.sums for rank in found[2]]


@pytest.fixture(scope="module")
def one():
    return _first_sums(JOBS["moe"])


def test_packed_documents_keep_their_mask_on_every_stage(stages, one):
    assert abs(one["packed"] - one["joined"]) > 1e-2
    for stage in stages:
        assert stage["packed"] == pytest.approx(one["packed"], rel=1e-5)
        assert stage["joined"] == pytest.approx(one["joined"], rel=1e-5)


def test_every_rank_has_the_sums_and_the_router_counts_of_the_whole_model(stages, one):
    for stage in stages:
        assert stage["aux"] == pytest.approx(one["aux"], rel=1e-5)
        assert stage["counts"].keys() == one["counts"].keys()
        assert all(torch.equal(stage["counts"][layer], count) for layer, count in one["counts"].items())
        assert stage["entropy"] == pytest.approx(one["entropy"], rel=1e-5) and one["entropy"] > 0


def test_each_rank_holds_its_stage_only_and_the_seam_leaves_no_gradient_behind(stages, one):
    assert sorted(stages[0]["names"] + stages[1]["names"]) == one["names"]
    assert stages[0]["held"] + stages[1]["held"] == one["held"]
    assert not stages[0]["left"] and not stages[1]["left"]


def test_the_seam_computes_with_the_parameters_that_it_is_given(stages, one):
    for stage in stages:
        assert stage["doubled"] == pytest.approx(one["doubled"], rel=1e-5)
    assert abs(one["doubled"] - one["packed"]) > 1e-2


def test_evaluation_is_that_of_one_process_for_any_number_of_micro_batches(found):
    expected = [evaluate(FREE, 1), evaluate(FREE, 5), evaluate(AVERAGED, 5)]
    for rank in found[2]:
        for losses, right in zip(rank.evaluated, expected, strict=True):
            assert losses == pytest.approx(right, rel=1e-5)


@settings(deadline=None)
@given(n_layers=st.integers(1, 200), stages=st.integers(1, 64))
def test_stages_hold_every_layer_once_in_order_and_differ_by_one_layer_at_most(n_layers, stages):
    layers = stage_layers(n_layers, stages)
    assert [layer for stage in layers for layer in stage] == list(range(n_layers))
    assert len(layers) == stages and max(map(len, layers)) - min(map(len, layers)) <= 1


def test_layers_left_over_go_to_the_middle_and_never_to_the_stage_with_the_head():
    assert [len(stage) for stage in stage_layers(5, 2)] == [3, 2]
    assert [len(stage) for stage in stage_layers(7, 4)] == [2, 2, 2, 1]
    assert [len(stage) for stage in stage_layers(6, 4)] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("layout", "data_ranks", "job", "words"),
    [
        ({"pp": 8}, 1, JOB, ("model.n_layers = 4", "8 pipeline stages", "distributed.pp")),
        ({"pp": 3, "pp_schedule": "interleaved_1f1b"}, 1, JOB, ("n_layers = 4", "6 pipeline stages", "3 x 2 a rank")),
        ({"pp": 4}, 4, JOB, ("distributed.pp = 4", "at least 4 micro-batches", "gives 2", "gpipe")),
        (
            {"pp": 2, "pp_schedule": "zero_bubble"}, 1, evolve(JOB, train=evolve(TRAIN, global_batch_size=7)),
            ("7 micro-batches", "multiple of 2", "zero_bubble"),
        ),
        ({"pp": 2, "pp_virtual_stages": 2}, 1, JOB, ("pp_virtual_stages = 2", "1f1b", "interleaved_1f1b")),
        (
            {"pp": 2, "pp_schedule": "zero_bubble"}, 1, evolve(JOB, train=evolve(TRAIN, compile=True)),
            ("zero_bubble", "train.compile"),
        ),
        (
            {"pp": 2, "pp_schedule": "zero_bubble", "reshard_after_forward": "always"}, 1, JOB,
            ("zero_bubble", "reshard_after_forward = auto"),
        ),
        (
            {"pp": 2, "pp_schedule": "zero_bubble"}, 1,
            evolve(JOB, train=evolve(TRAIN, activation_checkpointing="selective")),
            ("zero_bubble", "activation_checkpointing = full"),
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_run_is_refused_with_its_numbers(layout, data_ranks, job, words):
    with pytest.raises(ConfigError) as refusal:
        check_pipeline(evolve(job, distributed=DistributedConfig(**layout)), data_ranks)
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)


def test_gpipe_takes_fewer_micro_batches_than_stages():
    check_pipeline(evolve(JOB, distributed=DistributedConfig(pp=4, pp_schedule="gpipe")), data_ranks=8)


def test_parts_know_the_names_of_the_whole_model():
    parts = build_parts(JOB, build_runtime(JOB))
    assert set(parts.names) == {name for name, _ in parts.model.named_parameters()}
