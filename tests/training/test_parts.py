"""The parts of a run: made from the config alone, and a template that is the state without its storage."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from forge.config import (
    AdamW,
    FreezeStage,
    JobConfig,
    ModelConfig,
    MoEConfig,
    Muon,
    NoSchedule,
    ProfilingConfig,
    ScheduleFree,
    TrainConfig,
)
from forge.data.batch import Batch
from forge.distributed import parallelize
from forge.errors import ConfigError
from forge.pytree import tree_equal, tree_flatten_named
from forge.training.parts import build_parts, initial_state, step_for, template_state
from forge.training.plan import plan_run
from forge.training.runtime import build_runtime
from tests.devices import needs_cuda

MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=61, max_seq_len=16)
JOB = JobConfig(
    model=MODEL, train=TrainConfig(steps=8, seq_len=16, global_batch_size=2, micro_batch_size=2, device="cpu")
)
THAW = (FreezeStage(("blocks.0.*",)), FreezeStage(("blocks.0.*",), False, 3))

JOBS = {
    "adamw": JOB,
    "muon": evolve(JOB, optimizer=Muon()),
    "schedule_free": evolve(JOB, optimizer=ScheduleFree(), scheduler=NoSchedule()),
    "bf16 weights": evolve(JOB, train=evolve(JOB.train, param_dtype="bf16")),
    "sigmoid experts": evolve(JOB, model=evolve(MODEL, moe=MoEConfig(n_experts=4, router="sigmoid"))),
    "thawed on the way": evolve(JOB, train=evolve(JOB.train, freeze=THAW)),
    "recomputed": evolve(JOB, train=evolve(JOB.train, activation_checkpointing="full")),
}


def _parts(job):
    return build_parts(job, build_runtime(job))


def _run(job, steps):
    parts = _parts(job)
    state, step_at = initial_state(job, parts), step_for(job, parts)
    for step in range(steps):
        ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step))
        ids = ids.view(-1, job.train.micro_batch_size, 16).to(parts.runtime.device)
        train_step, state = step_at(step, state)
        state, _ = train_step(state, Batch(ids, ids.clone()))
    return state


def _layout(state):
    return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in tree_flatten_named(state).items()}


@pytest.mark.parametrize("steps", [0, 1, 3, 4])
@pytest.mark.parametrize("name", JOBS)
def test_the_template_is_the_state_without_storage(name, steps):
    job = JOBS[name]
    template = template_state(job, _parts(job), steps)
    assert _layout(template) == _layout(_run(job, steps))
    assert {leaf.device.type for leaf in tree_flatten_named(template).values()} == {"meta"}


@pytest.mark.parametrize("name", JOBS)
def test_nothing_is_allocated_before_the_state(name):
    assert all(p.device.type == "meta" for p in _parts(JOBS[name]).model.parameters())


def test_the_initial_state_depends_on_the_seed_alone():
    torch.manual_seed(3)
    first = initial_state(JOB, _parts(JOB))
    torch.manual_seed(4)
    assert tree_equal(initial_state(JOB, _parts(JOB)), first)
    other = evolve(JOB, train=evolve(JOB.train, seed=1, data_seed=7))
    assert not tree_equal(initial_state(other, _parts(other)).params, first.params)


def test_names_do_not_depend_on_recomputation_or_compilation():
    names = list(initial_state(JOB, _parts(JOB)).params)
    kinds = ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}, {"compile": True})
    for changes in kinds:
        job = evolve(JOB, train=evolve(JOB.train, **changes))
        assert list(initial_state(job, _parts(job)).params) == names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize(
    ("kind", "scope"), [("none", "block"), ("full", "block"), ("selective", "block"), ("none", "model")]
)
def test_compiled_blocks_train_as_others_do(kind, scope):
    job = evolve(JOB, train=evolve(JOB.train, compile=True, compile_scope=scope, activation_checkpointing=kind))
    compiled, plain = (tree_flatten_named(_run(each, 2).params) for each in (job, JOB))
    for name, leaf in compiled.items():
        torch.testing.assert_close(leaf, plain[name], rtol=1e-4, atol=1e-4, msg=name)


def test_compiled_blocks_are_called_from_python_where_a_profile_is_to_see_into_them(monkeypatch):
    asked = []
    monkeypatch.setattr(parallelize, "compile_blocks", lambda model, **options: asked.append(options["lean"]))
    compiled = evolve(JOB, train=evolve(JOB.train, compile=True))
    for job in (compiled, evolve(compiled, profiling=ProfilingConfig(steps=2))):
        _parts(job)
    assert asked == [not torch.cuda.is_available(), False]


def test_cuda_graphs_are_refused_on_a_cpu_by_a_run_alone():
    job = evolve(JOB, train=evolve(JOB.train, compile=True, cuda_graphs=True))
    with pytest.raises(ConfigError, match=r"train\.cuda_graphs = true needs CUDA, and this is a cpu: set it"):
        _parts(job)
    assert plan_run(job, tflops=1.0).memory == plan_run(JOB, tflops=1.0).memory


@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_replayed_as_cuda_graphs_train_as_others_do(precision):
    train = evolve(JOB.train, device="cuda", precision=precision, micro_batch_size=1, compile=True)
    plain, replayed = (evolve(JOB, train=evolve(train, cuda_graphs=graphs)) for graphs in (False, True))
    for name, leaf in tree_flatten_named(_run(replayed, 5).params).items():
        torch.testing.assert_close(leaf, tree_flatten_named(_run(plain, 5).params)[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_bit_of_training(kind):
    job = evolve(JOB, train=evolve(JOB.train, activation_checkpointing=kind))
    assert tree_equal(_run(job, 3), _run(JOB, 3))


def test_a_frozen_block_stays_and_then_trains():
    start = initial_state(JOB, _parts(JOB)).params["blocks.0.mlp.w_up.weight"]
    job = JOBS["thawed on the way"]
    assert torch.equal(_run(job, 3).params["blocks.0.mlp.w_up.weight"], start)
    assert not torch.equal(_run(job, 4).params["blocks.0.mlp.w_up.weight"], start)


def test_steps_between_two_stages_are_one_and_the_same():
    job = JOBS["thawed on the way"]
    parts = _parts(job)
    step_at, state = step_for(job, parts), initial_state(job, parts)
    steps = []
    for step in range(5):
        made, state = step_at(step, state)
        steps.append(made)
    assert steps[0] is steps[1] is steps[2] and steps[3] is steps[4] and steps[2] is not steps[3]


def test_bf16_weights_have_fp32_masters():
    state = initial_state(JOBS["bf16 weights"], _parts(JOBS["bf16 weights"]))
    assert {p.dtype for p in state.params.values()} == {torch.bfloat16}
    masters = [leaf for name, leaf in tree_flatten_named(state.opt_state).items() if leaf.shape == (61, 16)]
    assert masters and all(leaf.dtype == torch.float32 for leaf in masters)
    assert any(torch.equal(leaf.bfloat16(), state.params["embed.weight"]) for leaf in masters)


@pytest.mark.parametrize(("precision", "width", "least"), [("fp32", 18, 4), ("bf16", 20, 8)])
def test_experts_of_a_width_that_their_product_does_not_take_are_refused(precision, width, least):
    moe = MoEConfig(n_experts=4, expert_hidden_dim=width)
    job = evolve(JOB, model=evolve(MODEL, moe=moe), train=evolve(JOB.train, precision=precision))
    with pytest.raises(ConfigError, match=f"width on each rank = {width} is no multiple of {least}, as experts need"):
        _parts(job)
    _run(evolve(job, model=evolve(MODEL, moe=evolve(moe, expert_hidden_dim=24))), 1)


def test_a_freeze_pattern_that_matches_nothing_is_refused_before_anything_is_made():
    job = evolve(JOB, optimizer=AdamW(), train=evolve(JOB.train, freeze=(FreezeStage(("blocks.7.*",), True, 5),)))
    with pytest.raises(ConfigError, match=r"'blocks\.7\.\*' matches no parameter"):
        _parts(job)
