"""What `plan` calculates is what real ranks hold and send."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from attrs import evolve

from benchmarks.traffic import TrafficCounter
from forge.config import DistributedConfig, FreezeStage, MoEConfig, Muon
from forge.distributed.fsdp import fsdp_modules
from forge.distributed.shards import local_part
from forge.pytree import tree_leaves
from forge.training.freeze import trainable_names
from forge.training.parts import build_parts, initial_state, seam_for, step_for
from forge.training.plan_activations import count_activations
from forge.training.plan_layout import build_layout
from forge.training.plan_ranks import stored_bytes
from forge.training.plan_traffic import step_traffic
from forge.training.runtime import build_runtime, open_runtime
from tests.distributed.ranks import run_ranks
from tests.distributed.training import JOB, MODEL, TRAIN, global_batch, local_batch

CPU = evolve(TRAIN, device="cpu", micro_batch_size=2)
SMALL = evolve(MODEL, n_layers=2)
MOE = MoEConfig(n_experts=4, top_k=2, n_shared_experts=1, expert_hidden_dim=16, frequency=2)


def _job(train=CPU, optimizer=JOB.optimizer, **model):
    return evolve(JOB, model=evolve(SMALL, **model), train=train, optimizer=optimizer)


AGAIN = evolve(CPU, activation_checkpointing="full")
JOBS = {
    "plain": _job(),
    "deep": _job(n_layers=4),
    "again": _job(AGAIN),
    "bf16": _job(evolve(CPU, precision="bf16")),
    "bf16 weights": _job(evolve(CPU, precision="bf16", param_dtype="bf16")),
    "odd": _job(dim=40, vocab_size=37, ffn_hidden_dim=50),
    "frozen": _job(evolve(CPU, freeze=(FreezeStage(("embeddings",)),))),
    "tied": _job(tied_embeddings=True),
    "gpt2": _job(norm="layernorm", bias=True, mlp="gelu", position="learned", qk_norm=False),
    "muon": _job(optimizer=Muon()),
    "experts": _job(moe=MOE),
    "experts again": _job(AGAIN, moe=MOE),
    "experts, muon": _job(optimizer=Muon(), moe=MOE),
}
GPIPE, LOOPED, ZERO = ({"pp": 2, "pp_schedule": s} for s in ("gpipe", "interleaved_1f1b", "zero_bubble"))
CASES = {
    1: [("plain", {}), ("experts", {})],
    2: [
        *(("plain", layout) for layout in ({}, {"dp_replicate": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, GPIPE)),
        *(("again", layout) for layout in ({}, {"tp": 2}, {"cp": 2})), ("deep", LOOPED), ("deep", ZERO | {"pp_virtual_stages": 2}),
        *(("experts again", layout) for layout in ({"tp": 2}, {"cp": 2})), ("experts", {"ep": 2}), ("experts", ZERO),
        ("gpt2", {"tp": 2}), ("bf16", {"tp": 2}), ("bf16 weights", {}), ("odd", {}), ("frozen", {}),
    ],
    4: [
        ("plain", {}), ("plain", {"dp_replicate": 2}), ("plain", {"tp": 2, "cp": 2}), ("odd", {}),
        ("tied", {"pp": 2, "tp": 2}), ("bf16", {"pp": 2}), ("experts", {}), ("experts again", {"ep": 2, "tp": 2}),
        ("muon", {"tp": 2}), ("muon", {"dp_replicate": 2}), ("experts, muon", {"ep": 2}),
    ],
}  # fmt: skip


class _Measured(NamedTuple):
    """What one rank has and does."""

    pp_rank: int
    shard_rank: int
    parameters: int
    gradients: int
    optimizer: int
    sent: dict[str, float]
    saved: int


class _Saved:
    """Bytes that autograd keeps at the same time, at most; what FSDP2 gathers left out."""

    def __init__(self, model: Any) -> None:
        groups = [group for module in fsdp_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups]
        gathered = [tensor for group in groups for param in group.fsdp_params for tensor in param.all_gather_outputs]
        self.gathered = {tensor.untyped_storage()._cdata for tensor in gathered}
        self.held: dict[int, list[int]] = {}
        self.now = self.peak = 0

    def pack(self, tensor):
        storage = local_part(tensor).untyped_storage()
        return tensor if storage._cdata in self.gathered else _Kept(self, tensor, storage)


class _Kept:
    def __init__(self, saved, tensor, storage):
        self.saved, self.tensor, self.key = saved, tensor, storage._cdata
        count = saved.held.setdefault(self.key, [0, storage.nbytes()])
        count[0] += 1
        if count[0] == 1:
            saved.now += count[1]
            saved.peak = max(saved.peak, saved.now)

    def __del__(self):
        count = self.saved.held[self.key]
        count[0] -= 1
        if not count[0]:
            self.saved.now -= self.saved.held.pop(self.key)[1]


def _bytes(tree):
    return sum(local_part(leaf).nbytes for leaf in tree_leaves(tree))


def _measure(job, layout):
    job = evolve(job, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state = initial_state(job, parts)
        stored = _bytes(state.params), _bytes(state.opt_state)
        batch = local_batch(global_batch(0), runtime.data_rank, runtime.data_ranks, job.train.micro_batch_size)
        step_at = step_for(job, parts)
        step, state = step_at(0, state)
        if "pp" in layout:  # the first step of a pipeline sends a number over each boundary
            state, _ = step(state, batch)
        with TrafficCounter() as counter:
            state, _ = step(state, batch)
        saved = _Saved(parts.model)
        seam = seam_for(job, parts, trainable_names(job.train.freeze, parts.names, 0))
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda kept: getattr(kept, "tensor", kept)):
            _, grads = seam(state.params, state.extras, batch)
        mesh = runtime.mesh
        return _Measured(
            pp_rank=mesh.rank("pp") if mesh else 0,
            shard_rank=mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1) if mesh else 0,
            parameters=stored[0],
            gradients=_bytes(grads),
            optimizer=stored[1],
            sent={kind: size for kind, size in counter.sent.items() if size},
            saved=saved.peak,
        )


def _measure_all(world_size):
    return [_measure(JOBS[name], layout) for name, layout in CASES[world_size]]


@pytest.fixture(scope="module")
def ranks():
    return {1: [_measure_all(1)]} | {
        world_size: run_ranks(_measure_all, world_size, world_size) for world_size in (2, 4)
    }


def _planned(world_size, index):
    """The job in its layout, and the names that it trains."""
    name, layout = CASES[world_size][index]
    job = evolve(JOBS[name], distributed=DistributedConfig(**layout))
    runtime = build_runtime(job)
    return job, build_layout(job, world_size, runtime.compute_dtype, runtime.param_dtype)


def _cases(*names):
    return [
        pytest.param(w, i, id=f"{name}-{w} ranks-{'-'.join(f'{k} {v}' for k, v in layout.items())}")
        for w, cases in CASES.items()
        for i, (name, layout) in enumerate(cases)
        if name in (names or JOBS)
    ]


@pytest.mark.parametrize(("world_size", "index"), _cases())
def test_a_rank_holds_what_is_planned_to_the_byte(ranks, world_size, index):
    job, layout = _planned(world_size, index)
    learned = trainable_names(job.train.freeze, layout.shapes, 0)
    for found in (rank[index] for rank in ranks[world_size]):
        planned = stored_bytes(layout, found.pp_rank, learned, found.shard_rank)
        assert planned == {
            "parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer
        }  # fmt: skip


@pytest.mark.parametrize(("world_size", "index"), _cases())
def test_a_rank_sends_what_is_planned_to_the_byte(ranks, world_size, index):
    job, layout = _planned(world_size, index)
    learned = trainable_names(job.train.freeze, layout.shapes, 0)
    exchanged = []
    for found in (rank[index] for rank in ranks[world_size]):
        planned, sent = step_traffic(layout, found.pp_rank, learned), dict(found.sent)
        if "all-to-all" in planned:  # as the routers will: on average over the ranks, near what even ones would
            exchanged.append(sent.pop("all-to-all") / planned.pop("all-to-all"))
        assert sent == planned
    assert not exchanged or sum(exchanged) / len(exchanged) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("world_size", "index"), _cases("plain", "deep", "experts", "bf16", "odd", "gpt2")[2:])
def test_activations_on_several_ranks_are_estimated_and_not_too_low(ranks, world_size, index):
    job, layout = _planned(world_size, index)
    activations = count_activations(layout)
    # zero_bubble frees a part of each pass with the inputs' gradients, and the plan counts it until the weights' are made
    most = 1.8 if job.distributed.pp_schedule == "zero_bubble" else 1.3
    for found in (rank[index] for rank in ranks[world_size]):
        planned = activations.of_rank(layout, found.pp_rank)
        assert 0.95 * found.saved < planned < most * found.saved


def test_fsdp_over_four_ranks_holds_a_third_of_one_ranks_parameters_gradients_and_optimizer_state(ranks):
    alone = ranks[1][0][0]
    for found in (rank[0] for rank in ranks[4]):
        held = found.parameters + found.gradients + found.optimizer
        assert held <= 0.35 * (alone.parameters + alone.gradients + alone.optimizer)
