"""What comes with packed documents of several sources is the same in every layout: losses by source, positions."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from forge.config import DataConfig, DataPhase, DataSource, DistributedConfig
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.runtime import open_runtime
from tests.distributed.ranks import run_ranks
from tests.distributed.training import GLOBAL, JOB, MODEL, global_batch, local_batch

SOURCES = tuple(DataSource(name, "unread") for name in ("a", "b", "never"))
RESTARTED = evolve(MODEL, position="learned", restart_positions=True)
MIXED = evolve(JOB, model=RESTARTED, data=DataConfig(sources=SOURCES, phases=(DataPhase(1, lr_scale=0.5),)))
LAYOUTS = {"fsdp2": {}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}}


def _two_steps(layout):
    job = evolve(MIXED, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, step_at, found = initial_state(job, parts), step_for(job, parts), []
        for n in range(2):
            step, state = step_at(n, state)
            batch = evolve(global_batch(n), source_ids=(torch.arange(GLOBAL) % 3 % 2).unsqueeze(0))
            batch = local_batch(batch, runtime.data_rank, runtime.data_ranks, 2)
            state, result = step(state, batch)
            assert float(result.source_loss.sum() / result.tokens) == pytest.approx(float(result.ce_loss), rel=1e-5)
            found.append((result.source_loss.tolist(), result.source_tokens.tolist(), float(result.lr)))
        return found


def _all_layouts():
    return {name: _two_steps(layout) for name, layout in LAYOUTS.items()}


def test_sums_by_source_and_the_scaled_lr_are_those_of_one_process_in_every_layout():
    alone = _two_steps({})
    assert alone[0][1][2] == 0 and min(alone[0][1][:2]) > 0
    assert alone[1][2] == pytest.approx(alone[0][2])  # warmup over two updates has doubled it, the phase halves it
    for rank in run_ranks(_all_layouts, 2):
        for name, found in rank.items():
            for (loss, tokens, lr), (expected, count, expected_lr) in zip(found, alone, strict=True):
                assert (tokens, lr) == (count, expected_lr), name
                assert loss == pytest.approx(expected, rel=1e-5), name
