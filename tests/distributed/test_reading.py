"""A run read back by two ranks in any layout: the loss and the text of one process, and the sample at its end too."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
from attrs import evolve

import cli
from forge.config import AdamW, CheckpointConfig, DataConfig, EvalConfig, JobConfig, MetricsConfig, TrainConfig
from forge.training import run_training
from tests.distributed.ranks import run_ranks
from tests.distributed.training import MOE

LAYOUTS = [
    ("fsdp2",),
    ("ddp2", "--distributed.dp-replicate", "2"),
    ("tp2", "--distributed.tp", "2"),
    ("cp2", "--distributed.cp", "2"),
    ("ep2", "--distributed.ep", "2"),
    ("pp2", "--distributed.pp", "2"),
    ("pp2 interleaved", "--distributed.pp", "2", "--distributed.pp-schedule", "interleaved_1f1b"),
]
PROMPTS = ["--prompt", "3 times 4 is", "--prompt", "7", "--max-new-tokens", "20"]


def _job(folder: Path) -> JobConfig:
    """Experts, places that are learned, a vocabulary that two ranks share unevenly."""
    (folder / "text").mkdir()
    for n in range(8):
        (folder / "text" / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    return JobConfig(
        run_dir=str(folder / "run"),
        model=evolve(MOE, vocab_size=257, position="learned"),
        train=TrainConfig(steps=2, seq_len=16, global_batch_size=4, micro_batch_size=4),
        optimizer=AdamW(lr=1e-2),
        data=DataConfig(path=str(folder / "text"), eval_fraction=0.2, cache_dir=str(folder / "cache")),
        eval=EvalConfig(batch_size=3, sample_tokens=30, sample_prompt="7", sample_temperature=0.0),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(log_interval=1, tensorboard=False, peak_tflops=0.1),
    )


def _said(*argv) -> str:
    """Standard output of the command line in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        assert cli.main([str(word) for word in argv]) == 0, err.getvalue()
    return out.getvalue()


def _reads(run_dir, flags) -> tuple[str, str, str]:
    text = ["generate", "--run-dir", run_dir, *PROMPTS, *flags]
    return (
        _said("eval", "--run-dir", run_dir, "--batches", "3", *flags),
        _said(*text, "--temperature", "0"),
        _said(*text, "--seed", "3", "--min-p", "0.01"),
    )


def _on_two_ranks(job):
    found = {name: _reads(job.run_dir, flags) for name, *flags in LAYOUTS}
    ends = {}
    for dim in ("dp_shard", "tp"):
        own = evolve(job, run_dir=f"{job.run_dir}-{dim}", train=evolve(job.train, micro_batch_size=2))
        own = evolve(own, distributed=evolve(job.distributed, **{dim: 2}))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run_training(own)
        if dim == "tp":  # a run is read in its own layout where no flag says another
            found["the run's own"] = _reads(own.run_dir, [])
            found["as one process"] = None if os.environ["RANK"] == "1" else own.run_dir
        ends[dim] = out.getvalue()
    return found, ends


@pytest.mark.slow
def test_every_layout_evaluates_and_generates_as_one_process_and_rank_0_alone_prints(tmp_path):
    job = _job(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_training(job)
    alone = _reads(job.run_dir, [])
    (found, ends), (silent, _) = run_ranks(_on_two_ranks, 2, job)
    own_run, own = found.pop("as one process"), found.pop("the run's own")
    for name, said in found.items():
        assert said == alone, name
        assert silent[name] == ("", "", ""), name
    assert own == _reads(own_run, [])
    sample = out.getvalue().partition("a sample:")[2].partition("done:")[0]
    assert sample.strip().startswith("7")
    assert [end.partition("a sample:")[2].partition("done:")[0] for end in ends.values()] == [sample] * len(ends)
