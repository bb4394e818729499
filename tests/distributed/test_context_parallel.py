"""Sequences cut over ranks train the same model: masks, positions and loss are those of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.batch import Batch
from forge.distributed.context_parallel import build_sequence_cut, held_chunks, shard_sequence
from forge.distributed.mesh import build_mesh
from forge.errors import ConfigError
from forge.training.parts import build_parts, initial_state
from forge.training.runtime import build_runtime, open_runtime
from tests.distributed.parity import assert_same_curve
from tests.distributed.ranks import run_ranks
from tests.distributed.training import JOB, MODEL, MOE, TRAIN, global_batch, local_batch, train

SHORT = evolve(TRAIN, steps=3)
SOFTMAX = evolve(MOE.moe, router="softmax", aux_loss_weight=0.02, router_z_loss_weight=0.01, capacity_factor=1.0)
JOBS = {
    "window": evolve(JOB, model=evolve(MODEL, sliding_window=5), train=SHORT),
    "learned positions, tied": evolve(
        JOB, model=evolve(MODEL, position="learned", tied_embeddings=True), train=evolve(SHORT, micro_batch_size=2)
    ),
    "recomputed": evolve(JOB, train=evolve(SHORT, activation_checkpointing="selective")),
    "experts with aux loss and capacity": evolve(JOB, model=evolve(MOE, moe=SOFTMAX), train=SHORT),
}
CASES = {
    2: [("cp2", {"cp": 2}, job) for job in JOBS],
    4: [("ddp2 x cp2", {"cp": 2, "dp_replicate": 2}, "window"),
        ("cp4", {"cp": 4}, "experts with aux loss and capacity")],
}  # fmt: skip


def _train_all(world_size):
    curves = {(name, job): train(JOBS[job], layout) for name, layout, job in CASES[world_size]}
    return curves, _evaluate(world_size), *((_gather(), _refusal()) if world_size == 2 else ())


def _evaluate(world_size):
    """Sums over a batch with documents, and over one without."""
    job = evolve(JOB, distributed=evolve(JOB.distributed, cp=min(2, world_size)))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, found = initial_state(job, parts), []
        for batch in (global_batch(9), evolve(global_batch(9), doc_ids=None)):
            mine = local_batch(batch, runtime.data_rank, runtime.data_ranks, 2)
            sums = parts.eval_step(state.params, state.extras, mine)
            found.append((float(sums.ce), int(sums.tokens)))
        return found


@pytest.fixture(scope="module")
def ranks():
    return {world_size: run_ranks(_train_all, world_size, world_size) for world_size in CASES}


@pytest.mark.parametrize(("world_size", "layout", "job"), [(w, c[0], c[2]) for w in CASES for c in CASES[w]])
def test_a_cut_sequence_trains_as_a_whole_one(ranks, world_size, layout, job):
    alone = train(JOBS[job])
    for rank in ranks[world_size]:
        assert_same_curve(rank[0][layout, job], alone)


@pytest.mark.parametrize("world_size", CASES)
def test_evaluation_is_that_of_one_process_with_and_without_documents(ranks, world_size):
    expected = _evaluate(1)
    assert expected[0] != expected[1]
    for rank in ranks[world_size]:
        assert rank[1] == [(pytest.approx(ce, rel=1e-6), tokens) for ce, tokens in expected]


@settings(deadline=None)
@given(ranks=st.integers(1, 5), size=st.integers(1, 3))
def test_the_ranks_share_every_token_once_and_look_at_as_many_keys_each(ranks, size):
    length = 2 * ranks * size
    ids = torch.arange(length).expand(2, 3, length)
    batch = Batch(ids, ids + 100, ids + 200, torch.zeros(2, 3))
    parts = [shard_sequence(batch, rank, ranks) for rank in range(ranks)]
    held = torch.cat([part.input_ids for part in parts], dim=-1)
    assert torch.equal(held.sort(dim=-1).values, ids)
    for part in parts:
        assert torch.equal(part.labels, part.input_ids + 100) and torch.equal(part.doc_ids, part.input_ids + 200)
        assert part.source_ids is batch.source_ids
    keys = [int((part.input_ids[0, 0] + 1).sum()) for part in parts]
    assert len(set(keys)) == 1


def _gather():
    """What a rank gets of the others' parts, and the gradient it is given for its own."""
    cut = build_sequence_cut(build_mesh(evolve(JOB.distributed, cp=2), 2, "cpu").group("cp"))
    whole = torch.arange(24.0).view(2, 12)
    part = cut.take(whole, -1).requires_grad_()
    gathered = cut.gather(part, -1)
    (gathered * whole * (1 + cut.chunks[0])).sum().backward()  # the other rank weighs the same by one more
    return torch.equal(gathered, whole), torch.equal(part.grad, 3 * cut.take(whole, -1))


def test_gathering_restores_the_order_and_sums_the_gradients_of_all_ranks(ranks):
    assert [rank[2] for rank in ranks[2]] == [(True, True)] * 2


def test_chunks_are_one_early_and_one_late():
    assert [held_chunks(rank, 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def _refusal():
    job = evolve(JOB, train=evolve(TRAIN, seq_len=14), distributed=evolve(JOB.distributed, cp=2))
    with open_runtime(job) as runtime:
        try:
            build_parts(job, runtime)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_length_that_cannot_be_cut_is_refused_with_the_numbers(ranks):
    expected = "train.seq_len = 14 is not divisible by 2 x distributed.cp = 4, two chunks a rank: make it 12 or 16"
    assert [rank[3] for rank in ranks[2]] == [expected] * 2
    ids = torch.zeros(1, 1, 14, dtype=torch.int64)
    with pytest.raises(ConfigError, match="seq_len = 14"):
        shard_sequence(Batch(ids, ids), 0, 2)


def test_one_rank_is_left_alone():
    batch = global_batch(0)
    assert shard_sequence(batch, 0, 1) is batch
    assert build_parts(JOB, build_runtime(JOB)).model.cut is None
