"""What one rank alone sees of a bad update, all see: they skip, roll back and go on together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.checkpoint import list_checkpoints
from forge.config import CheckpointConfig, Constant, DistributedConfig
from forge.data.batch import IGNORE
from forge.model.norm import RMSNorm
from forge.training import data_pipeline, run_training
from forge.training.data_pipeline import build_data_pipeline
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.replay import replay_step
from forge.training.runtime import open_runtime
from tests.distributed.ranks import run_ranks
from tests.distributed.test_entry import TRAIN as SHORT
from tests.distributed.test_entry import _job
from tests.distributed.training import JOB, gathered, global_batch, local_batch

LAYOUTS = {"fsdp2": {}, "ddp2": {"dp_replicate": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
FAULTS = {3: "nan loss", 4: "inf gradient", 5: "spike"}  # by step
WATCHFUL = evolve(JOB, train=evolve(JOB.train, spike_sigma=4.0, spike_window=3), scheduler=Constant(warmup_steps=0))


def _poisoned(fault):
    """A forward hook that breaks what one rank computes: its hidden states, or only their gradient."""

    def hook(module, args, output):
        if fault == "nan loss":
            return output * math.nan
        output.register_hook(lambda grad: grad * (math.inf if fault == "inf gradient" else 1e5))
        return None

    return hook


def _seven_steps(layout):
    """What each of seven steps reports, and whether it moved any bit; three fail, one after another, on rank 1 alone."""
    job = evolve(WATCHFUL, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, step_at = initial_state(job, parts), step_for(job, parts)
        norm = [module for module in parts.model.modules() if isinstance(module, RMSNorm)][-1]
        params, found = gathered(state.params, runtime), []
        for n in range(7):
            fails = n in FAULTS and torch.distributed.get_rank() == 1
            handle = norm.register_forward_hook(_poisoned(FAULTS[n])) if fails else None
            step, state = step_at(n, state)
            batch = local_batch(global_batch(n), runtime.data_rank, runtime.data_ranks, job.train.micro_batch_size)
            state, result = step(state, batch)
            before, params = params, gathered(state.params, runtime)
            moved = any(not torch.equal(params[name], before[name]) for name in params)
            found.append((bool(result.skipped), moved, float(result.loss), float(result.grad_norm)))
            if handle is not None:
                handle.remove()
        return found, params, int(state.extras["spikes"]["seen"])


def _bad_batches(change):
    def changed(*args, **options):
        data = build_data_pipeline(*args, **options)
        return evolve(data, training=change(data.batch_at))

    data_pipeline.build_data_pipeline = changed


def _without_targets(batch):
    return evolve(batch, labels=torch.full_like(batch.labels, IGNORE))


def _rolled_back(job, straight):
    """Updates 5 to 7 have no target: back to the checkpoint at 4, on with batch 7. Then the same batches in one go."""
    _bad_batches(lambda batch_at: lambda n: _without_targets(batch_at(n)) if n in (4, 5, 6) else batch_at(n))
    run_training(job)
    replayed = [replay_step(job.run_dir, step, report=lambda line: None) for step in (4, 10)]
    _bad_batches(lambda batch_at: lambda n: batch_at(n if n < 4 else n + 3))
    run_training(straight)
    return replayed


def _two_ranks(job, straight):
    return {name: _seven_steps(layout) for name, layout in LAYOUTS.items()}, _rolled_back(job, straight)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    train = evolve(SHORT, steps=10, max_consecutive_skips=2)
    job = evolve(_job(folder, "rolled"), train=train, checkpoint=CheckpointConfig(interval=2, keep_last_n=9))
    straight = evolve(job, run_dir=str(folder / "straight"))
    return evolve(job, train=evolve(train, max_rollbacks=1)), straight


@pytest.fixture(scope="module")
def ranks(jobs):
    return run_ranks(_two_ranks, 2, *jobs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_of_one_rank_skips_the_update_on_all(layout, ranks):
    (steps, params, seen), (others, other_params, _) = (found[layout] for found, _ in ranks)
    assert str(steps) == str(others), "every rank reports the same"  # NaN is not equal to itself
    assert [skipped for skipped, *_ in steps] == [n in FAULTS for n in range(7)]
    assert [moved for _, moved, *_ in steps] == [n not in FAULTS for n in range(7)]
    assert [math.isfinite(loss) for _, _, loss, _ in steps[3:]] == [False, True, True, True]
    assert [math.isfinite(norm) for *_, norm in steps[3:]] == [False, False, True, True]
    assert seen == 5
    for name, tensor in params.items():
        assert torch.equal(tensor, other_params[name]) and tensor.isfinite().all()


def test_all_ranks_roll_back_together_and_their_steps_can_be_made_again(jobs, ranks):
    assert [replayed for _, replayed in ranks] == [[True, True]] * 2
    curves = [
        [json.loads(line) for line in Path(job.run_dir, "metrics.jsonl").read_text().splitlines()] for job in jobs
    ]
    losses = [{line["step"]: line["train/loss"] for line in lines if "train/loss" in line} for lines in curves]
    assert losses[0] == losses[1] and list(losses[0]) == list(range(1, 11))
    names = [[path.name for path in list_checkpoints(Path(job.run_dir, "checkpoints"))] for job in jobs]
    assert names[0] == names[1]
