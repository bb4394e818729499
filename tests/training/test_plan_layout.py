"""The arithmetic of a layout is what `build_parts` makes of a model, for any mix of layouts and every rank."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import AdamW, DataConfig, DistributedConfig, JobConfig, ModelConfig, MoEConfig, Muon, TrainConfig
from forge.distributed.shards import local_part
from forge.errors import ConfigError
from forge.training.parts import build_parts
from forge.training.plan_activations import in_flight
from forge.training.plan_layout import build_layout, stated_gpus
from forge.training.plan_ranks import format_ranks, plan_ranks
from forge.training.plan_traffic import ring_bytes
from forge.training.runtime import open_runtime
from tests.distributed.ranks import fake_rank

MODEL = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=72, max_seq_len=32, ffn_hidden_dim=48, bias=True,
    qk_norm=True, moe=MoEConfig(n_experts=4, n_shared_experts=1, expert_hidden_dim=32, frequency=2),
)  # fmt: skip
TRAIN = TrainConfig(steps=6, seq_len=32, global_batch_size=2**6 * 9, micro_batch_size=1, device="cpu")
JOB = JobConfig(model=MODEL, train=TRAIN, optimizer=AdamW())


layouts = st.fixed_dictionaries(
    {"dp_replicate": st.sampled_from([1, 2]), "dp_shard": st.sampled_from([1, 2, 3, 8]), "tp": st.sampled_from([1, 2, 4]),
     "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 4]), "pp": st.sampled_from([1, 2])}
)  # fmt: skip


@settings(deadline=None, max_examples=10)
@given(sizes=layouts, tied=st.booleans(), learned=st.booleans(), data=st.data())
def test_every_rank_stores_the_shapes_that_arithmetic_gives_it(sizes, tied, learned, data):
    world_size = math.prod(sizes.values())
    rank = data.draw(st.integers(0, world_size - 1))
    model = evolve(MODEL, tied_embeddings=tied, position="learned" if learned else "rope")
    job = evolve(JOB, model=model, distributed=DistributedConfig(**sizes))
    layout = build_layout(job, world_size, torch.float32, torch.float32)
    if world_size == 1:
        return
    with fake_rank(rank, world_size), open_runtime(job) as runtime:
        parts, mesh = build_parts(job, runtime), runtime.mesh
        real = {name: tuple(local_part(p.detach()).shape) for name, p in parts.model.named_parameters()}
        place = mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1)
        stages = layout.stages(mesh.rank("pp"))
    assert real == {name: layout.local_shape(name, place) for stage in stages for name in stage}


@settings(deadline=None)
@given(sizes=layouts)
def test_the_ranks_of_a_stage_hold_every_number_as_often_as_there_are_copies(sizes):
    layout = build_layout(evolve(JOB, distributed=DistributedConfig(**sizes)), math.prod(sizes.values()), torch.float32, torch.float32)  # fmt: skip
    for name, shape in layout.shapes.items():
        ranks = sizes["dp_shard"] * sizes["ep"] * sizes["cp"]
        held = sum(math.prod(layout.local_shape(name, rank)) for rank in range(ranks))
        cut = sizes["tp"] if layout.is_cut_by_tp(name) else 1
        assert held * cut == math.prod(shape)
        assert math.prod(layout.local_shape(name)) == max(
            math.prod(layout.local_shape(name, rank)) for rank in range(ranks)
        )


def test_a_ring_sends_the_whole_but_for_the_own_part():
    assert ring_bytes("all-gather", 800, 8) == ring_bytes("reduce-scatter", 800, 8) == 700
    assert ring_bytes("all-reduce", 800, 8) == 1400
    assert ring_bytes("point-to-point", 800, 8) == 800
    assert ring_bytes("all-reduce", 800, 1) == 0


def test_zero_stage_three_sends_three_times_the_parameters():
    """Rajbhandari et al. 2020, sec. 7.2.2: 3 psi numbers, less what never leaves a rank and is gathered once only."""
    model = ModelConfig(dim=64, n_layers=8, n_heads=4, vocab_size=64, max_seq_len=32)
    job = evolve(JOB, model=model, train=evolve(TRAIN, global_batch_size=64))
    plan = plan_ranks(job, 64, tflops=1.0)
    sent = plan.traffic[0]["all-gather"] + plan.traffic[0]["reduce-scatter"]
    blocks = plan.parameters.total - plan.parameters.by_part["embedding"] - plan.parameters.by_part["head"]
    assert sent == pytest.approx(4 * 63 / 64 * (2 * plan.parameters.total + blocks), rel=0.01)


def test_a_schedule_holds_as_many_passes_as_it_says():
    def passes(schedule, rank, **more):
        chosen = DistributedConfig(pp=4, pp_schedule=schedule, **more)
        train = evolve(TRAIN, global_batch_size=16)
        model = evolve(MODEL, n_layers=8)
        job = evolve(JOB, model=model, train=train, distributed=chosen)
        return in_flight(build_layout(job, 4, torch.float32, torch.float32), rank)

    assert [passes("1f1b", rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [passes("gpipe", rank) for rank in range(4)] == [16] * 4
    assert [passes("interleaved_1f1b", rank) for rank in range(4)] == [11, 9, 7, 5]


def test_a_plan_of_ranks_shows_layout_batch_memory_and_what_is_sent():
    job = evolve(JOB, distributed=DistributedConfig(tp=2, ep=2, pp=2), optimizer=Muon())
    shown = format_ranks(plan_ranks(job, 16, tflops=1.0))
    assert "16 GPUs: pp 2 x dp_shard 2 x ep 2 x tp 2" in shown
    assert "576 sequences: 4 data ranks x 1 a micro-batch x 144 accumulated" in shown
    for part in ("parameters", "gradients", "optimizer", "gathered", "unreduced", "activations"):
        assert f"\n  {part} " in shown
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point-to-point", "broadcast"):
        assert f"\n  {kind} " in shown


def test_more_shards_take_less_memory_and_time():
    job = evolve(JOB, data=DataConfig(isolate_documents=False))
    few, many = plan_ranks(job, 2, tflops=1.0), plan_ranks(job, 8, tflops=1.0)
    for part in ("parameters", "gradients", "optimizer"):
        assert many.memory[0][part] < 0.3 * few.memory[0][part]
    assert many.memory[0]["activations"] == few.memory[0]["activations"]
    assert many.seconds == few.seconds / 4


def test_the_number_of_gpus_follows_from_the_sizes():
    assert stated_gpus(JOB) == 1
    assert stated_gpus(evolve(JOB, distributed=DistributedConfig(tp=2, pp=4))) == 8
    assert stated_gpus(evolve(JOB, distributed=DistributedConfig(dp_shard=3, ep=2))) == 6


def test_auto_is_bf16_on_the_gpus_that_are_planned_for():
    auto = evolve(JOB, train=evolve(TRAIN, device="auto"))
    assert plan_ranks(auto, 2, tflops=1.0).layout.compute_dtype == torch.bfloat16
    assert plan_ranks(JOB, 2, tflops=1.0).layout.compute_dtype == torch.float32


def test_kernels_and_products_of_cuda_are_planned_without_it():
    plain = evolve(JOB, train=evolve(TRAIN, device="auto"))
    gpus = evolve(plain, model=evolve(JOB.model, attention_backend="cudnn"), train=evolve(plain.train, fp8=True))
    assert plan_ranks(gpus, 2, tflops=1.0).memory == plan_ranks(plain, 2, tflops=1.0).memory


def test_cuda_graphs_are_planned_for_one_gpu_and_refused_for_more():
    graphs = evolve(JOB, train=evolve(TRAIN, compile=True, cuda_graphs=True))
    assert plan_ranks(graphs, 1, tflops=1.0).memory == plan_ranks(JOB, 1, tflops=1.0).memory
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs = true needs one process, and there are 2"):
        plan_ranks(graphs, 2, tflops=1.0)


REFUSED = {
    "tp 5 = 5 x does not divide": ({"tp": 5}, 8),
    "n_heads": ({"tp": 8}, 8),
    "seq_len": ({"cp": 3}, 3),
    "n_experts": ({"ep": 3}, 3),
    "n_layers": ({"pp": 5}, 5),
    "global_batch_size": ({}, 7),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_plan_refuses_what_a_run_would_refuse(words):
    sizes, gpus = REFUSED[words]
    job = evolve(JOB, distributed=DistributedConfig(**sizes))
    with pytest.raises(ConfigError) as caught:
        plan_ranks(job, gpus, tflops=1.0)
    assert all(word in str(caught.value) for word in words.split(" x ")) and "\n" not in str(caught.value)
