"""FSDP2 trains the same model to the same losses as one process, with every optimizer; test_parity.py has the rest."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from torch.distributed.tensor import DTensor

from forge.config import SGD, DistributedConfig, FreezeStage, Lion
from forge.distributed.fsdp import reshard_after_forward
from forge.distributed.parallelize import materialize
from forge.errors import ConfigError
from forge.training.parts import build_parts, initial_state, seam_for
from forge.training.runtime import open_runtime
from tests.distributed.parity import assert_same_curve
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    AVERAGED,
    FREE,
    JOB,
    MODEL,
    TRAIN,
    evaluate,
    global_batch,
    local_batch,
    train,
    whole,
)

JOBS = {
    "lion": evolve(JOB, optimizer=Lion(lr=1e-3)),
    "sgd": evolve(JOB, optimizer=SGD()),
    "schedule_free": FREE,
    "mup": evolve(JOB, model=evolve(MODEL, mup_base_dim=16)),
    "recomputed": evolve(JOB, train=evolve(TRAIN, activation_checkpointing="full")),
    "selectively recomputed": evolve(JOB, train=evolve(TRAIN, activation_checkpointing="selective")),
    "bf16 weights": evolve(JOB, train=evolve(TRAIN, param_dtype="bf16", precision="fp32")),
    "frozen for three steps": evolve(
        JOB, train=evolve(TRAIN, freeze=(FreezeStage(("blocks.1.*", "embed*")), FreezeStage(("*",), False, 3)))
    ),
}
OPTIONS = {
    "freed at once, two ahead": {"reshard_after_forward": "always", "prefetch_blocks": 2},
    "never freed": {"reshard_after_forward": "never"},
}


def _train_all():
    curves = {name: train(job) for name, job in JOBS.items()}
    return curves | {name: train(JOBS["recomputed"], layout) for name, layout in OPTIONS.items()}


@pytest.fixture(scope="module")
def curves():
    return run_ranks(_train_all, 2)


@pytest.mark.parametrize("job", [*JOBS, *OPTIONS])
def test_sharding_does_not_change_the_training(job, curves):
    exact = job != "bf16 weights"  # gradients of bf16 weights are bf16, and their sum depends on its order
    alone = train(JOBS.get(job, JOBS["recomputed"]))
    for rank in curves:
        assert_same_curve(
            rank[job],
            alone,
            losses=1e-5 if exact else 2e-3,
            norms=1e-4 if exact else 2e-2,
            params=2e-4 if exact else 2e-2,
        )


def _parts_of_rank():
    """What one rank holds, and how the seam treats parameters that are not the module's own."""
    with open_runtime(JOB) as runtime:
        parts = build_parts(JOB, runtime)
        state = initial_state(JOB, parts)
        held = sum(leaf.to_local().numel() for leaf in state.params.values())
        sharded = all(isinstance(leaf, DTensor) for leaf in state.params.values())
        seam = seam_for(JOB, parts)
        batch = local_batch(global_batch(0), runtime.data_rank, runtime.data_ranks, 2)
        first, _ = seam(state.params, {}, batch)
        doubled = {name: 2 * p for name, p in state.params.items()}
        second, grads = seam(doubled, {}, batch)
        try:
            torch.func.vmap(lambda ids: seam(doubled, {}, evolve(batch, input_ids=ids))[0].total)(batch.input_ids[None])
            refused = ""
        except ConfigError as error:
            refused = str(error)
        norm = sum(float(whole(g).square().sum()) for g in grads.values())
        left = [p.grad for p in parts.model.parameters() if p.grad is not None]
        return held, sharded, float(first.total), float(second.total), norm, refused, left


def test_each_rank_holds_its_share_and_the_seam_computes_with_what_it_is_given():
    ranks = run_ranks(_parts_of_rank, 2)
    whole_size = sum(p.numel() for p in build_parts(JOB, runtime=_alone()).model.parameters())
    assert sum(rank[0] for rank in ranks) == whole_size and max(rank[0] for rank in ranks) < 0.55 * whole_size
    for _, sharded, first, second, norm, refused, left in ranks:
        assert sharded and not left and norm > 0
        assert abs(first - second) > 1e-3, "loss(p) != loss(2p)"
        assert "torch.func" in refused and "build_functional_value_and_grad" in refused
    assert ranks[0][2:5] == ranks[1][2:5]


def _alone():
    from forge.training.runtime import build_runtime

    return build_runtime(JOB)


def _gathered(layout):
    """What is gathered on this rank: after a forward pass, and while the first block computes."""
    job = evolve(JOB, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        model = build_parts(job, runtime).model
        materialize(model, job, runtime.device)
        blocks, ahead = list(model.blocks.children()), []

        def look(*_):
            groups = [block._get_fsdp_state()._fsdp_param_groups[0] for block in blocks]
            ahead.extend(group._all_gather_result is not None for group in groups)

        blocks[0].attn_norm.register_forward_pre_hook(look)
        model(global_batch(0).input_ids[0], output=lambda hidden, weight, _: hidden)
        weights = (blocks[0].attn.wq.weight, model.embed.weight)
        return tuple(not isinstance(weight, DTensor) for weight in weights), ahead


def _gathered_by_option():
    pipeline = DistributedConfig(pp=2), DistributedConfig(pp=2, reshard_after_forward="always")
    found = [_gathered(layout) for layout in (
        {}, {"reshard_after_forward": "always"}, {"reshard_after_forward": "never"}, {"prefetch_blocks": 2}
    )]  # fmt: skip
    return found, [reshard_after_forward(config) for config in pipeline]


def test_options_say_when_parameters_are_gathered_and_freed():
    for found, pipeline in run_ranks(_gathered_by_option, 2):
        auto, always, never, ahead = found
        assert auto[0] == (False, True)  # of a block, of the embedding
        assert always[0] == (False, False) and never[0] == (True, True)
        assert auto[1] == [False] * 4 and ahead[1] == [False, True, True, False]
        assert pipeline == [False, True]


def _evaluate_both():
    return evaluate(FREE), evaluate(AVERAGED)


def test_evaluation_is_that_of_one_process_and_leaves_the_training_parameters():
    expected = _evaluate_both()
    for found in run_ranks(_evaluate_both, 2):
        for losses, right in zip(found, expected, strict=True):
            assert losses == pytest.approx(right, rel=1e-5)
