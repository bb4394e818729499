"""Every layout of the table trains the curve of one process; what cannot be is one line. The page says which is which."""

from __future__ import annotations

import functools
import math
import os
from typing import get_args

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from forge.config import DistributedConfig, ModelConfig, MoEConfig, PipelineSchedule
from forge.errors import ConfigError
from forge.training.parts import build_parts
from forge.training.plan_layout import build_layout
from forge.training.runtime import open_runtime
from tests.distributed import layouts
from tests.distributed.layouts import COLUMNS, JOBS, ROWS, job_of
from tests.distributed.parity import assert_same_curve
from tests.distributed.ranks import fake_rank, run_ranks
from tests.distributed.training import JOB, MODEL, TRAIN, train

EVERY = [pytest.param(row, job, id=f"{row.name}-{job}") for row in ROWS for job in JOBS]


def _train_all(world_size):
    return {
        (row.name, job): train(job_of(row, job), row.sizes) for row in ROWS for job in JOBS if row.ranks == world_size
    }


@pytest.fixture(scope="module")
def curves():
    """(row, job) -> what every rank made of it."""
    by_rank = [run_ranks(_train_all, world_size, world_size) for world_size in (2, 4)]
    return {case: [rank[case] for rank in ranks] for ranks in by_rank for case in ranks[0]}


@functools.cache
def _alone(job):
    return train(job)


def _differences(curves, row, job):
    """What was not as on one process; empty where all was."""
    try:
        for curve in curves[row.name, job]:
            assert_same_curve(curve, _alone(job_of(row, job)))
    except AssertionError as difference:
        return str(difference)
    return ""


@pytest.mark.parametrize(("row", "job"), EVERY)
def test_a_layout_does_not_change_the_training(curves, row, job):
    assert _differences(curves, row, job) == ""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("column", COLUMNS)
def test_what_a_column_says_was_really_so(curves, row, column):
    jobs, evidence = COLUMNS[column]
    assert jobs and all(evidence(row, job_of(row, job), curves[row.name, job][0]) for job in jobs)


REFUSED = {
    "sizes that do not make the number of processes": ({"dp_shard": 2, "tp": 4}, 4, {}, {}),
    "sizes that do not divide it": ({"tp": 3}, 4, {}, {}),
    "a batch that the ranks cannot share": ({}, 3, {}, {}),
    "query heads that tp cannot share": ({"tp": 8}, 8, {}, {}),
    "key and value heads that tp cannot share": ({"tp": 4}, 4, {}, {}),
    "a hidden width that tp cannot share": ({"tp": 2}, 2, {"ffn_hidden_dim": 47}, {}),
    "a sequence that tp cannot share": ({"tp": 4}, 4, {"n_kv_heads": 4}, {"seq_len": 10}),
    "a sequence that cp cannot share": ({"cp": 2}, 2, {}, {"seq_len": 14}),
    "ep without experts": ({"ep": 2}, 2, {}, {}),
    "experts that ep cannot share": ({"ep": 3}, 3, {"moe": MoEConfig(n_experts=4)}, {"global_batch_size": 9}),
    "more pipeline stages than layers": ({"pp": 8}, 8, {}, {}),
    "several stages a rank in a schedule of one": ({"pp": 2, "pp_virtual_stages": 2}, 2, {}, {}),
    "fewer micro-batches than pipeline ranks": ({"pp": 4}, 4, {}, {"micro_batch_size": 4}),
    "uneven rounds of micro-batches": (
        {"pp": 2, "pp_schedule": "zero_bubble"}, 2, {}, {"global_batch_size": 5, "micro_batch_size": 1}
    ),
    "compiled blocks under zero_bubble": ({"pp": 2, "pp_schedule": "zero_bubble"}, 2, {}, {"compile": True}),
    "a model compiled as one": ({}, 2, {}, {"compile": True, "compile_scope": "model"}),
}  # fmt: skip


class _Allocations(TorchDispatchMode):
    """Bytes of tensors with storage that were made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in torch_pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.bytes += sum(leaf.nbytes for leaf in leaves if leaf.device.type != "meta")
        return made


def _build(job, world_size):
    """As far as a run gets before it allocates parameters."""
    with fake_rank(0, world_size), open_runtime(job) as runtime:
        job.accumulation_steps(runtime.data_ranks)
        return build_parts(job, runtime)


def _refusal(what):
    sizes, world_size, model, changes = REFUSED[what]
    job = evolve(
        JOB, model=evolve(MODEL, **model), train=evolve(TRAIN, **changes), distributed=DistributedConfig(**sizes)
    )
    with _Allocations() as allocated, pytest.raises(ConfigError) as caught:
        _build(job, world_size)
    flags = [f"--distributed.{key.replace('_', '-')} {value}" for key, value in sizes.items()]
    return f"{world_size} processes {' '.join(flags)}".strip(), str(caught.value), allocated.bytes


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_one_line_before_anything_is_allocated(what):
    _, answer, allocated = _refusal(what)
    assert ("\n" not in answer and any(char.isdigit() for char in answer)) or "compile" in answer
    assert allocated < 8192, "more than the numbers of the ranks, of which the mesh makes a few tables"


def _model(n_layers, moe, **shape):
    return ModelConfig(n_layers=n_layers, moe=evolve(moe, frequency=min(moe.frequency, n_layers)), **shape)


models = st.builds(
    _model, dim=st.just(24), n_layers=st.integers(1, 4), n_heads=st.sampled_from([2, 4, 6]), n_kv_heads=st.just(2),
    head_dim=st.just(4), ffn_hidden_dim=st.sampled_from([24, 36, 50]), vocab_size=st.sampled_from([36, 48]),
    max_seq_len=st.just(48), tied_embeddings=st.booleans(),
    moe=st.sampled_from([MoEConfig(), MoEConfig(n_experts=4, expert_hidden_dim=12), MoEConfig(n_experts=6, frequency=2)]),
)  # fmt: skip
sizes = st.fixed_dictionaries(
    {dim: st.sampled_from([1, 1, 1, 2, 2, 3, 4]) for dim in ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")}
    | {
        "pp_schedule": st.sampled_from(get_args(PipelineSchedule)),
        "pp_virtual_stages": st.sampled_from([None, None, 1, 2]),
    }
)


@settings(deadline=None, max_examples=60)
@given(model=models, sizes=sizes, seq_len=st.sampled_from([12, 24, 48]), batch=st.sampled_from([24, 36, 48]))
def test_any_layout_is_built_or_refused_in_one_line_and_a_plan_says_the_same(model, sizes, seq_len, batch):
    changes = evolve(TRAIN, seq_len=seq_len, global_batch_size=batch, micro_batch_size=1)
    job = evolve(JOB, model=model, train=changes, distributed=DistributedConfig(**sizes))
    world_size = math.prod(size for dim, size in sizes.items() if not dim.startswith("pp_"))
    if world_size == 1:
        return
    answers = []
    for attempt in (
        lambda: _build(job, world_size),
        lambda: build_layout(job, world_size, torch.float32, torch.float32),
    ):
        try:
            attempt()
            answers.append(None)
        except ConfigError as error:
            assert "\n" not in str(error)
            answers.append(str(error))
    assert (answers[0] is None) == (answers[1] is None), answers


def test_the_page_says_what_the_suite_has_shown(curves):
    held = {(row.name, job): _differences(curves, row, job) == "" for row in ROWS for job in JOBS}
    rendered = layouts.page(held, {what: _refusal(what)[:2] for what in REFUSED})
    if os.environ.get(layouts.WRITE):
        layouts.PAGE.parent.mkdir(exist_ok=True)
        layouts.PAGE.write_text(rendered, encoding="utf-8")
    assert layouts.PAGE.read_text(encoding="utf-8") == rendered
