"""A whole run on several processes: the same curve, files from rank 0 alone, resumed at any size."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from forge.checkpoint import list_checkpoints
from forge.config import (
    AdamW,
    CheckpointConfig,
    Constant,
    DataConfig,
    EvalConfig,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
    save_config,
)
from forge.data import IteratorStream
from forge.errors import Stopped
from forge.training import run_training
from forge.training.hooks import Hook
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
MODEL = ModelConfig(dim=32, n_layers=2, n_heads=2, vocab_size=257, max_seq_len=16, init_std=0.1)
TRAIN = TrainConfig(steps=6, seq_len=16, global_batch_size=8, micro_batch_size=2)


def _job(folder: Path, name: str) -> JobConfig:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for n in range(8):
        (text / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    return JobConfig(
        run_dir=str(folder / name),
        model=MODEL,
        train=TRAIN,
        optimizer=AdamW(lr=1e-2),
        scheduler=Constant(warmup_steps=2),
        data=DataConfig(path=str(text), eval_fraction=0.2, cache_dir=str(folder / "cache")),
        eval=EvalConfig(interval=3, batches=2, batch_size=3, sample_tokens=4),
        checkpoint=CheckpointConfig(interval=2),
        metrics=MetricsConfig(log_interval=1, peak_tflops=0.1),
    )


class _StopRank(Hook):
    """Sends one rank alone a signal after a step."""

    def __init__(self, rank, step, number=signal.SIGTERM):
        self.rank, self.step, self.number = rank, step, number

    def on_step_end(self, event):
        if event.step == self.step and os.environ["RANK"] == str(self.rank):
            os.kill(os.getpid(), self.number)


def _run(job, *stop):
    try:
        return int(run_training(job, hooks=_StopRank(*stop) if stop else None).step)
    except Stopped as stopped:
        return f"{stopped.exit_status} {stopped}"


def _runs(job, *stops):
    """The run started again after each time that a rank was sent a signal."""
    return [_run(job, *stop) for stop in stops]


def _curve(job, key="train/loss"):
    lines = [json.loads(line) for line in Path(job.run_dir, "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[key]) for line in lines if key in line]
    assert len(found) == len(dict(found))
    return dict(found)


def test_a_run_on_two_ranks_is_the_run_of_one_and_goes_on_at_any_size(tmp_path):
    alone, pair, moved = (_job(tmp_path, name) for name in ("alone", "pair", "moved"))
    run_training(alone)
    assert run_ranks(_runs, 2, pair, ()) == [[6], [6]]
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/tokens"):
        assert _curve(pair, key) == pytest.approx(_curve(alone, key), rel=1e-4)
    names = sorted(p.name for p in os.scandir(pair.run_dir))
    assert names == [
        ".lock",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "provenance.jsonl",
        "samples.jsonl",
        "tensorboard",
    ]
    stopped = run_ranks(_runs, 2, moved, (0, 1, signal.SIGINT), (1, 3, signal.SIGUSR1))
    for rank in stopped:
        assert [line.partition(" in ")[0] for line in rank] == [
            "130 stopped by SIGINT: saved step 2",
            "138 stopped by SIGUSR1: saved step 4",
        ]
    run_training(evolve(moved, train=evolve(TRAIN, steps=5)))
    assert run_ranks(_runs, 2, moved, ()) == [[6], [6]]
    assert _curve(moved) == pytest.approx(_curve(alone), rel=1e-4)


def _run_on_stream(job, *stop):
    stream = IteratorStream(lambda start: (f"{n} and {n + 1} make {2 * n + 1}; " * 3 for n in range(start, 9)))
    try:
        return int(run_training(job, hooks=_StopRank(*stop) if stop else None, data=stream).step)
    except Stopped as stopped:
        return f"{stopped}".partition(" in ")[0]


def _runs_on_stream(straight, stopped, *stop):
    return [_run_on_stream(straight), _run_on_stream(stopped, *stop), _run_on_stream(stopped)]


def test_a_run_on_a_stream_on_two_ranks_stopped_and_resumed_equals_one_that_was_not_and_that_of_one(tmp_path):
    alone, straight, stopped = (
        evolve(job, data=evolve(job.data, path="/unread"), eval=evolve(job.eval, interval=0))
        for job in (_job(tmp_path, name) for name in ("alone", "straight", "stopped"))
    )
    ended = [6, "stopped by SIGTERM: saved step 4", 6]
    assert run_ranks(_runs_on_stream, 2, straight, stopped, 1, 3) == [ended, ended]
    last, again = (_arrays(job, 6) for job in (straight, stopped))
    assert last == again and len(last) > 1
    assert _curve(stopped) == _curve(straight)
    assert _run_on_stream(alone) == 6
    assert _curve(straight) == pytest.approx(_curve(alone), rel=1e-4)


def _arrays(job, step):
    """The bytes of each file of numbers of a checkpoint."""
    files = Path(job.run_dir, "checkpoints", f"step_{step:08d}").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_sigterm_to_any_one_of_four_ranks_alone_stops_all_of_them_at_one_step(tmp_path):
    job, alone = (
        evolve(job, train=evolve(TRAIN, steps=13), eval=evolve(job.eval, interval=0))
        for job in (_job(tmp_path, "four"), _job(tmp_path, "alone"))
    )
    ended = run_ranks(_runs, 4, job, (0, 1), (1, 4), (2, 7), (3, 10))
    for rank in ended:
        assert [line.partition(" in ")[0] for line in rank] == [
            f"143 stopped by SIGTERM: saved step {step}" for step in (2, 5, 8, 11)
        ]
    assert [path.name for path in list_checkpoints(Path(job.run_dir, "checkpoints"))][-1].endswith("11")
    # What four ranks began, two and then one go on with.
    assert run_ranks(_runs, 2, evolve(job, train=evolve(job.train, steps=12)), ()) == [[12], [12]]
    assert _run(job) == _run(alone) == 13
    assert _curve(job) == pytest.approx(_curve(alone), rel=1e-4)


def test_the_command_line_under_torchrun_trains_and_names_the_rank_of_a_mistake(tmp_path):
    job = _job(tmp_path, "run")
    save_config(job, tmp_path / "job.toml")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "cli.py"]
    launch += ["--config", str(tmp_path / "job.toml"), "--distributed.tp", "2"]
    trained = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("done: ") == 1 and list(_curve(job)) == [1, 2, 3, 4, 5, 6]
    refused = subprocess.run([*launch, "--train.seq-len", "15"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and re.search(r"error \(rank [01]\): .*train\.seq_len", refused.stderr), (
        refused.stderr
    )
