"""Experts on several ranks train the same model: every token reaches its experts, every gradient counts once."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from attrs import evolve
from torch import Tensor

from forge.config import DistributedConfig, Muon
from forge.distributed.expert_parallel import check_experts
from forge.distributed.shards import local_part
from forge.errors import ConfigError
from forge.training.parts import build_parts, initial_state, seam_for, step_for
from forge.training.runtime import open_runtime
from tests.distributed.parity import assert_same_curve
from tests.distributed.ranks import run_ranks
from tests.distributed.training import JOB, MODEL, MOE, TRAIN, global_batch, local_batch, train, whole

SHORT = evolve(TRAIN, steps=3)
SIGMOID = evolve(JOB, model=MOE)
SOFTMAX = evolve(MOE.moe, router="softmax", aux_loss_weight=0.02, router_z_loss_weight=0.01, capacity_factor=1.0)
JOBS = {
    "softmax with capacity": evolve(JOB, model=evolve(MOE, moe=SOFTMAX), train=SHORT),
    "recomputed": evolve(SIGMOID, train=evolve(SHORT, activation_checkpointing="full", micro_batch_size=2)),
    "selectively recomputed": evolve(SIGMOID, train=evolve(SHORT, activation_checkpointing="selective")),
    "muon, every other layer": evolve(
        SIGMOID, model=evolve(MOE, moe=evolve(MOE.moe, frequency=2)), train=SHORT, optimizer=Muon(adam_lr=1e-2)
    ),
    "two experts": evolve(SIGMOID, model=evolve(MOE, mlp="gelu", moe=evolve(MOE.moe, n_experts=2)), train=SHORT),
}
CASES = {
    2: [("fsdp2", {}, "two experts"), ("ep2", {"ep": 2}, "softmax with capacity"),
        ("ep2", {"ep": 2}, "recomputed"), ("ep2", {"ep": 2}, "selectively recomputed")],
    4: [("fsdp2 x ep2", {"ep": 2, "prefetch_blocks": 2}, "softmax with capacity"),
        ("fsdp2 x ep2", {"ep": 2}, "muon, every other layer"), ("fsdp2 x ep2", {"ep": 2}, "two experts"),
        ("fsdp4", {}, "two experts"), ("ddp2 x ep2", {"ep": 2, "dp_replicate": 2}, "two experts"),
        ("cp2 x ep2", {"ep": 2, "cp": 2}, "softmax with capacity")],
}  # fmt: skip
STARVED = torch.tensor([9.0, 8.0, -8.0, -9.0])
"""A bias that sends every token to the first two experts: with two ranks, one gets none."""


class Routed(NamedTuple):
    """What the routers did."""

    counts: list[Tensor]  # by layer, of the global batch
    aux: float
    routing: dict[str, float]  # of the first update
    biases: list[Tensor]  # after three updates
    starved: dict[str, Tensor]  # gradients of the experts where all tokens go to the first two


def _route(layout):
    crowded = evolve(MOE, moe=evolve(MOE.moe, capacity_factor=1.0))
    job = evolve(SIGMOID, model=crowded, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, seam = initial_state(job, parts), seam_for(job, parts)
        batches = [local_batch(global_batch(n), runtime.data_rank, runtime.data_ranks, 1) for n in range(3)]
        sums, _ = seam(state.params, state.extras, batches[0])
        starved = {"router_bias": dict.fromkeys(state.extras["router_bias"], STARVED)}
        grads = seam(state.params, starved, batches[0])[1]
        experts = {name: whole(grad) for name, grad in grads.items() if ".experts." in name}
        step_at, results = step_for(job, parts), []
        for n, batch in enumerate(batches):
            step, state = step_at(n, state)
            state, result = step(state, batch)
            results.append(result)
        return Routed(
            list(sums.router_counts.values()),
            float(sums.aux),
            {name: float(getattr(results[0], name)) for name in ("moe_balance", "moe_entropy", "moe_dropped")},
            list(state.extras["router_bias"].values()),
            experts,
        )


def _held(layout):
    """Names and sizes of the expert weights that this rank holds."""
    job = evolve(SIGMOID, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        params = dict(build_parts(job, runtime).model.named_parameters())
        return {name: local_part(p.detach()).numel() / p.numel() for name, p in params.items() if ".experts." in name}


def _train_all(world_size):
    curves = {(name, job): train(JOBS[job], layout) for name, layout, job in CASES[world_size]}
    return curves, _route({"ep": 2}), _held({"ep": 2})


@pytest.fixture(scope="module")
def ranks():
    return {world_size: run_ranks(_train_all, world_size, world_size) for world_size in CASES}


@pytest.fixture(scope="module")
def alone():
    return {job: train(JOBS[job]) for job in JOBS}


@pytest.fixture(scope="module")
def routed():
    return _route({})


@pytest.mark.parametrize(("world_size", "layout", "job"), [(w, c[0], c[2]) for w in CASES for c in CASES[w]])
def test_experts_on_several_ranks_train_as_on_one(ranks, alone, world_size, layout, job):
    for rank in ranks[world_size]:
        assert_same_curve(rank[0][layout, job], alone[job])


@pytest.mark.parametrize("world_size", CASES)
def test_what_the_routers_did_is_that_of_the_global_batch(ranks, routed, world_size):
    for rank in ranks[world_size]:
        assert all(torch.equal(a, b) for a, b in zip(rank[1].counts, routed.counts, strict=True))
        assert rank[1].aux == pytest.approx(routed.aux, rel=1e-6)
        assert rank[1].routing == pytest.approx(routed.routing, rel=1e-5) and rank[1].routing["moe_dropped"] > 0
        assert all(torch.equal(a, b) for a, b in zip(rank[1].biases, routed.biases, strict=True))


@pytest.mark.parametrize("world_size", CASES)
def test_experts_that_no_token_reaches_get_a_zero_gradient(ranks, routed, world_size):
    for rank in ranks[world_size]:
        for name, grad in routed.starved.items():
            assert not grad[2:].any() and grad[:2].any()
            torch.testing.assert_close(rank[1].starved[name], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("world_size", CASES)
def test_each_rank_holds_its_share_of_the_experts(ranks, world_size):
    for rank in ranks[world_size]:
        assert rank[2] and all(share == 1 / world_size for share in rank[2].values())


def test_experts_that_cannot_be_dealt_out_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"n_experts = 4 is not divisible by distributed\.ep = 3"):
        check_experts(MOE.moe, 3)
    with pytest.raises(ConfigError, match=r"ep = 2, but the model has no experts.*dp_shard"):
        check_experts(MODEL.moe, 2)
