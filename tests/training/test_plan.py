"""A plan is what really happens: sizes against those of a real state and of what autograd really keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.config import (
    SGD,
    AdamW,
    DataConfig,
    FreezeStage,
    JobConfig,
    Lion,
    ModelConfig,
    MoEConfig,
    Muon,
    NoSchedule,
    ScheduleFree,
    TrainConfig,
    load_config,
)
from forge.data.batch import Batch
from forge.errors import ConfigError
from forge.metrics.memory import get_memory_stats, reset_peak_memory
from forge.pytree import tree_leaves
from forge.training.freeze import trainable_names
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_loss_fn
from forge.training.parts import build_parts, initial_state
from forge.training.plan import format_plan, plan_run
from forge.training.runtime import build_runtime

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
MODEL = ModelConfig(dim=16, n_layers=3, n_heads=2, vocab_size=61, max_seq_len=32)
JOB = JobConfig(
    model=MODEL, train=TrainConfig(steps=8, seq_len=24, global_batch_size=4, micro_batch_size=2, device="cpu")
)
MOE = MoEConfig(n_experts=4, expert_hidden_dim=8, n_shared_experts=1)

SCALARS = 256
"""Bytes of counts and denominators that the step saves beside what the model and the loss save."""


def _train(**changes):
    return evolve(JOB, train=evolve(JOB.train, **changes))


def _model(**changes):
    return evolve(JOB, model=evolve(MODEL, **changes))


JOBS = {
    "llama": JOB,
    "gpt2": _model(norm="layernorm", mlp="gelu", bias=True, position="learned", tied_embeddings=True),
    "grouped keys, norms on heads": _model(n_heads=4, n_kv_heads=2, qk_norm=True, logit_softcap=5.0),
    "window": _model(sliding_window=5, mlp="relu2"),
    "one document": evolve(JOB, data=DataConfig(isolate_documents=False)),
    "experts": _model(moe=MOE),
    "experts every other layer, sigmoid": _model(moe=evolve(MOE, router="sigmoid", frequency=2)),
    "plain loss": _train(loss="plain"),
    "chunked loss": _train(loss="chunked", loss_chunk_size=7),
    "fused loss in chunks": _train(loss_chunk_size=7),
    "bf16": _train(precision="bf16"),
    "bf16 weights": _train(param_dtype="bf16", precision="bf16"),
    "frozen embedding and blocks": _train(freeze=(FreezeStage(("embeddings", "blocks.0.*")),)),
    "thawed on the way": _train(freeze=(FreezeStage(("blocks.*",)), FreezeStage(("blocks.1.*",), False, 4))),
}


def _real(job):
    """What really is in memory: parameters, gradients, and storages that autograd kept after one micro-batch."""
    parts = build_parts(job, build_runtime(job))
    state = initial_state(job, parts)
    last = max([0, *(stage.start_step for stage in job.train.freeze)])
    learned = trainable_names(job.train.freeze, state.params, last)
    seam = build_value_and_grad(
        parts.model,
        build_loss_fn(job.train, job.model),
        vocab_size=MODEL.vocab_size,
        compute_dtype=parts.runtime.compute_dtype,
        trainable=learned,
    )
    own = {p.untyped_storage().data_ptr() for p in state.params.values()}
    kept, held = {}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage._cdata] = storage.nbytes()
            held.append(storage)  # no storage takes the place of a freed one
        return tensor

    ids = torch.randint(0, 60, (1, 2, job.train.seq_len), generator=torch.Generator().manual_seed(0))
    documents = torch.zeros_like(ids) if job.data.isolate_documents else None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _, grads = seam(state.params, state.extras, Batch(ids, ids.clone(), documents, None))
    return state, grads, sum(kept.values())


def _beside_sums(job) -> int:
    """Bytes with sums in fp32 over the bytes of the gradients: bf16 ones of several micro-batches add up in fp32."""
    return 3 if job.train.param_dtype == "bf16" and job.accumulation_steps() > 1 else 1


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_is_what_really_is_in_memory(name):
    job = JOBS[name]
    memory = plan_run(job, tflops=1).memory
    state, grads, kept = _real(job)
    assert memory["parameters"] == sum(p.nbytes for p in state.params.values())
    assert memory["gradients"] == _beside_sums(job) * sum(g.nbytes for g in grads.values())
    if job.train.precision == "bf16" and job.train.param_dtype == "fp32":
        assert memory["their casts"] == memory["parameters"] // 2
        assert memory["activations"] < kept <= memory["activations"] + memory["their casts"] + SCALARS
    else:
        assert memory["their casts"] == 0
        assert 0 <= kept - memory["activations"] <= SCALARS


OPTIMIZERS = {
    "adamw": JOB,
    "muon": evolve(JOB, optimizer=Muon()),
    "lion": evolve(JOB, optimizer=Lion()),
    "sgd": evolve(JOB, optimizer=SGD()),
    "schedule_free": evolve(JOB, optimizer=ScheduleFree(), scheduler=NoSchedule()),
    "masters of bf16 weights": evolve(JOB, optimizer=AdamW(), train=evolve(JOB.train, param_dtype="bf16")),
    "frozen": evolve(JOB, optimizer=Muon(), train=evolve(JOB.train, freeze=(FreezeStage(("attention",)),))),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planned_optimizer_state_is_the_real_one(name):
    job = OPTIMIZERS[name]
    state = initial_state(job, build_parts(job, build_runtime(job)))
    memory = plan_run(job, tflops=1).memory
    assert memory["optimizer"] == sum(leaf.nbytes for leaf in tree_leaves(state.opt_state)) > 0
    learned = trainable_names(job.train.freeze, state.params, 0)
    trained = sum(p.nbytes for name, p in state.params.items() if name in learned)
    assert memory["gradients"] == _beside_sums(job) * trained


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_the_planned_average_is_the_real_one(param_dtype):
    job = _train(ema_decay=0.99, param_dtype=param_dtype)
    state = initial_state(job, build_parts(job, build_runtime(job)))
    kept = sum(leaf.nbytes for leaf in tree_leaves(state.extras["ema"]))
    assert plan_run(job, tflops=1).memory["average"] == kept > 4 * sum(p.numel() for p in state.params.values())
    assert "average" not in plan_run(JOB, tflops=1).memory


@pytest.mark.parametrize("name", ["llama", "gpt2", "experts"])
def test_the_planned_parameters_are_those_of_the_model(name):
    job = JOBS[name]
    plan = plan_run(job, tflops=1)
    state = initial_state(job, build_parts(job, build_runtime(job)))
    assert (
        plan.parameters.total == sum(p.numel() for p in state.params.values()) == sum(plan.parameters.by_part.values())
    )
    assert (plan.parameters.active < plan.parameters.total) == (name == "experts")


def test_checkpointing_keeps_each_blocks_input_and_one_block():
    deep = evolve(JOB, model=evolve(MODEL, n_layers=8))
    plain = plan_run(deep, tflops=1).memory["activations"]
    job = evolve(deep, train=evolve(JOB.train, activation_checkpointing="full"))
    planned = plan_run(job, tflops=1).memory["activations"]
    block_inputs = 8 * 2 * 24 * 16 * 4
    assert block_inputs + plain // 10 < planned < block_inputs + plain // 2


def test_selective_checkpointing_keeps_attention_and_every_second_product_besides():
    jobs = [_train(activation_checkpointing=mode) for mode in ("full", "selective")]
    full, selective = (plan_run(job, tflops=1).memory["activations"] for job in jobs)
    # 2 x 24 tokens in fp32: wq, wv, w_gate (64 wide), w_down; of attention the output and one number a head. Of all but
    # one block, since the plan adds what one block computes again.
    kept = 4 * 48 * (16 + 16 + 64 + 16 + 16 + 2)
    assert selective - full == pytest.approx((3 - 1) * kept, rel=0.05)


def test_compiling_changes_no_planned_size():
    assert plan_run(_train(compile=True), tflops=1) == plan_run(JOB, tflops=1)


def test_cuda_graphs_keep_the_gradients_as_the_passes_make_them_too():
    graphs = {"compile": True, "cuda_graphs": True}
    memory = plan_run(_train(precision="bf16", **graphs), tflops=1).memory
    assert memory["bf16 gradients"] == memory["gradients"] // 2 > 0
    for without in (graphs, {"precision": "bf16"}):
        assert "bf16 gradients" not in plan_run(_train(**without), tflops=1).memory


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_what_needs_cuda_is_planned_without_it(backend):
    gpu = _train(fp8=True, precision="bf16")
    plan = plan_run(evolve(gpu, model=evolve(gpu.model, attention_backend=backend)), tflops=1)
    assert plan == plan_run(_train(precision="bf16"), tflops=1)


def test_time_is_flops_over_the_rate():
    plan = plan_run(JOB, tflops=2.0)
    assert plan.total_tokens == 8 * 4 * 24
    assert plan.seconds == pytest.approx(plan.flops_per_token * 768 / 2e12)


@pytest.fixture(scope="module")
def presets():
    """Name -> (plan, GiB that the process grew by while it was made)."""
    found = {}
    for path in PRESETS:
        reset_peak_memory("cpu")
        before = get_memory_stats("cpu")["allocated_gb"]
        plan = plan_run(load_config(path), tflops=400)
        found[path.stem] = plan, get_memory_stats("cpu")["peak_gb"] - before
    return found


@pytest.mark.parametrize("name", [path.stem for path in PRESETS])
def test_every_preset_has_a_plan_that_allocates_nothing(presets, name):
    plan, growth = presets[name]
    assert growth < 0.25
    assert all(size > 0 for part, size in plan.memory.items() if part != "their casts")
    assert plan.memory["parameters"] == 4 * plan.parameters.total


def test_llama_70b_is_70b_parameters_and_a_terabyte_of_state(presets):
    plan, _ = presets["llama_70b"]
    assert plan.parameters.total == 70_553_706_496
    assert sum(plan.memory.values()) > 2**40
    shown = format_plan(plan)
    assert "70.55 B" in shown and "GiB" in shown and "days" in shown


def test_sizes_are_shown_in_units_that_fit():
    shown = format_plan(plan_run(JOB, tflops=1))
    assert "KiB" in shown and "GiB" not in shown
    assert " 0.00" not in shown


def test_a_model_beyond_any_memory_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="numbers cannot be addressed") as caught:
        plan_run(_model(vocab_size=10**18), tflops=1)
    assert "\n" not in str(caught.value)
