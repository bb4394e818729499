"""A model to start from loads into any layout, and trains there as on one process."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from forge.checkpoint.huggingface import export_checkpoint, import_folder
from forge.checkpoint.save import save_checkpoint
from forge.config import DistributedConfig
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.reload import restore
from forge.training.runtime import build_runtime, open_runtime
from tests.distributed.ranks import run_ranks
from tests.distributed.training import JOB, global_batch, local_batch

LAYOUTS = {"fsdp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def _losses(checkpoint, layout):
    job = evolve(JOB, distributed=DistributedConfig(**layout))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state, losses = restore(checkpoint, job, parts), []
        for n in range(2):
            step, state = step_for(job, parts)(n, state)
            state, result = step(state, local_batch(global_batch(n), runtime.data_rank, runtime.data_ranks, 1))
            losses.append(float(result.loss))
        return losses


def _all_losses(checkpoint):
    return {name: _losses(checkpoint, layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    root = tmp_path_factory.mktemp("exchange")
    other = evolve(JOB, train=evolve(JOB.train, seed=3))
    saved = save_checkpoint(
        root / "saved", initial_state(other, build_parts(other, build_runtime(other))), config=other
    )
    export_checkpoint(saved, root / "hf", shard_bytes=10**9)
    import_folder(root / "hf", root / "run")
    checkpoint = root / "run/checkpoints/step_00000000"
    return _losses(checkpoint, {}), run_ranks(_all_losses, 2, checkpoint)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_imported_model_trains_on_several_ranks_as_on_one(losses, layout):
    alone, ranks = losses
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank[layout]), torch.tensor(alone), rtol=1e-5, atol=1e-5)
