"""The example for SLURM: right for bash, its command is understood, and SLURM's variables alone start a job."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import cli
from forge.config.flags import parse_job
from tests.cli_job import write_job
from tests.processes import free_port, start_job

SCRIPT = Path(__file__).parent.parent / "scripts" / "slurm.sh"


def _command() -> list[str]:
    """What srun starts, as words."""
    text = SCRIPT.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^srun (.*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_the_script_is_bash():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_flags_are_understood(monkeypatch):
    monkeypatch.chdir(SCRIPT.parent.parent)
    words = _command()
    start = words.index("cli.py")
    assert words[start + 1] == "train" and words[-1] == "$@"
    job = parse_job(words[start + 2 : -1], prog="", default_preset=cli.PRESET)
    warning = int(re.search(r"--signal=USR1@(\d+)", SCRIPT.read_text()).group(1))
    assert 0 < job.checkpoint.stop_within_seconds < warning  # else SLURM kills before forge gives up


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (2, False), (138, True), (143, True)])
def test_the_job_goes_back_to_the_queue_when_there_is_more_to_train(tmp_path, status, requeued):
    for name, body in {"srun": f"exit {status}", "scontrol": 'echo "$@" > requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    said = (tmp_path / "requeued").read_text() if (tmp_path / "requeued").exists() else ""
    assert said == ("requeue 7\n" if requeued else "")


def _slurm(rank: int, size: int, port: int) -> dict[str, str]:
    """What srun sets for a task of a step on this machine."""
    return {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": str(size),
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.slow
def test_slurms_variables_alone_start_a_job_that_only_rank_0_reports_of(tmp_path):
    preset, port = write_job(tmp_path), free_port()
    argv = ["cli.py", "train", "--config", preset, "--metrics.tensorboard"]
    with start_job(tmp_path / "job", argv, [_slurm(rank, 2, port) for rank in range(2)]) as job:
        first, second = job.end(seconds=120)
    assert (first.status, second.status) == (0, 0), (first.err, second.err)
    assert "[step 4] loss=" in first.out and "done: " in first.out
    assert (second.out, second.err) == ("", "")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/loss" in line] == [4]
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "step_00000004").iterdir())
    assert "params.00001.safetensors" in saved and "manifest.json" in saved
