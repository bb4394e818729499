"""A replica that changed unseen ends the run before the next checkpoint, and is named."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from attrs import evolve

from forge.checkpoint import list_checkpoints
from forge.config import CheckpointConfig, DistributedConfig, EvalConfig, MetricsConfig
from forge.distributed.shards import local_part
from forge.errors import RankError
from forge.resilience.health import build_health_check
from forge.training import entry, run_training
from tests.distributed.ranks import run_ranks
from tests.distributed.test_entry import _job

SPOILT = 3
"""The update after which rank 1 has another bit."""


def _spoil(state):
    """What a bad memory does: the lowest bit of one parameter."""
    local_part(next(iter(state.params.values())).detach()).view(torch.int32).flatten()[0] ^= 1


def _spoilt(step_for):
    def spoilt_for(config, parts):
        step_at = step_for(config, parts)

        def at(step, state):
            if step == SPOILT and dist.get_rank() == 1:
                _spoil(state)
            return step_at(step, state)

        return at

    return spoilt_for


def _counted(reads):
    """The check, noting at which updates it reads a state."""

    def build(runtime, interval):
        check = build_health_check(runtime, interval)

        def noted(step, state, result, due):
            class Seen:
                def __getattr__(self, name):
                    reads.append(step)
                    return getattr(state, name)

            check(step, Seen(), result, due)

        return noted

    return build


def _two_ranks(good, bad):
    reads = []
    entry.build_health_check = _counted(reads)
    assert int(run_training(good).step) == 6
    entry.build_health_check = build_health_check
    entry.step_for = _spoilt(entry.step_for)
    try:
        run_training(bad)
    except RankError as error:
        return sorted(set(reads)), str(error), error.exit_status
    return sorted(set(reads)), "", 0


def test_a_replica_with_another_bit_is_named_on_all_ranks_and_is_not_saved(tmp_path):
    job = evolve(_job(tmp_path, "good"), eval=EvalConfig(interval=0), metrics=MetricsConfig(tensorboard=False))
    job = evolve(job, data=evolve(job.data, eval_fraction=0.0), checkpoint=CheckpointConfig(interval=3))
    good = evolve(job, distributed=DistributedConfig(dp_replicate=2, health_check_interval=2))
    bad = evolve(job, run_dir=str(tmp_path / "bad"), checkpoint=CheckpointConfig(interval=1),
                 distributed=DistributedConfig(dp_replicate=2, health_check_interval=100))  # fmt: skip
    for reads, line, status in run_ranks(_two_ranks, 2, good, bad):
        assert reads == [2, 3, 4, 6], "on the interval and before checkpoints, and at no other update"
        assert status == 1 and line.startswith("health check after update 4: checksum is ") and "\n" not in line
        assert " on rank 1 (" in line and " on rank 0 (" in line and "must be the same" in line
    assert [path.name[-1] for path in list_checkpoints(Path(bad.run_dir, "checkpoints"))] == ["2", "3"]
