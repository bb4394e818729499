"""Jobs in which a rank fails, hangs or vanishes: they end soon, and say which rank it was.

The processes are started as a shell would start them, so that nobody else ends them.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch
from attrs import evolve

from forge.config import load_config, save_config
from forge.resilience import watch
from forge.training.runtime import Runtime
from tests.cli_job import write_job
from tests.processes import as_ranks, start_job

SOON = 30
"""Seconds on a machine that is busy with other tests; alone, it takes the watchdog's seconds and two or three more."""


@pytest.fixture
def preset(tmp_path):
    """A run of many steps that says nothing between the first and the last."""
    path = write_job(tmp_path)
    job = load_config(path)
    job = evolve(job, train=evolve(job.train, steps=10**6), checkpoint=evolve(job.checkpoint, interval=0))
    job = evolve(job, eval=evolve(job.eval, interval=0), metrics=evolve(job.metrics, log_interval=10**6))
    save_config(job, path)
    return path


def _start(preset, mishap, size=2, **distributed):
    job = load_config(preset)
    save_config(evolve(job, distributed=evolve(job.distributed, **distributed)), preset)
    argv = ["tests/hooked_run.py", preset, *mishap]
    return start_job(preset.parent / "job", argv, as_ranks(size) if size > 1 else [{}])


def _errors(ended):
    return [line for line in ended.err.splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_the_place_where_it_hangs(preset):
    with _start(preset, ("sleep", 1, 3), watchdog_seconds=3) as job:
        job.until("made 3", 1, "err")
        ended = job.end(seconds=3 + SOON)
    for rank, process in enumerate(ended):
        (line,) = _errors(process)
        assert process.status == 1 and line.startswith(f"error (rank {rank}): rank 1 (")
        assert "in the log and the hooks of step 3, at tests/hooked_run.py:" in line and "in sleep_for_long" in line
    stacks = preset.parent / "run" / "stacks"
    assert "sleep_for_long" in (stacks / "rank_1.txt").read_text() and "sleep_for_long" in ended[1].err
    assert "run_loop" in (stacks / "rank_0.txt").read_text() and "Thread 0x" not in ended[0].err


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_by_the_others(preset):
    with _start(preset, ("SIGSTOP", 1, 2), watchdog_seconds=3) as job:
        job.until("made 2", 1, "err")
        (ended,) = job.end([0], seconds=3 + SOON)
    (line,) = _errors(ended)
    assert ended.status == 1 and line.startswith("error (rank 0): rank 1 (") and "no sign of life" in line


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_though_nobody_else_does(preset):
    with _start(preset, ("raise", 1, 2), watchdog_seconds=0) as job:
        job.until("made 2", 1, "err")
        other, failed = job.end(seconds=SOON)
    assert failed.status == 1 and "Traceback" in failed.err
    assert _errors(failed) == ["error (rank 1): ValueError: a bug in the hook"]
    (line,) = _errors(other)
    assert other.status == 1 and "rank 1 (" in line and line.endswith("failed: ValueError: a bug in the hook")


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_also_where_it_held_the_store(preset):
    with _start(preset, ("SIGKILL", 0, 2), watchdog_seconds=0) as job:
        killed, other = job.end(seconds=60 + SOON)
    assert (killed.status, other.status) == (-signal.SIGKILL, 1)
    assert [line for line in _errors(other) if "rank 0 is gone" in line] == _errors(other) != []


@pytest.mark.slow
def test_a_process_alone_that_hangs_ends_with_its_stacks(preset):
    with _start(preset, ("sleep", 0, 2), size=1, watchdog_seconds=1) as job:
        job.until("made 2", 0, "err")
        (ended,) = job.end(seconds=1 + SOON)
    assert ended.status == 1 and "in sleep_for_long" in _errors(ended)[0]
    assert "sleep_for_long" in (preset.parent / "run" / "stacks" / "rank_0.txt").read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_a_collective_that_never_ends(preset):
    with _start(preset, ("SIGSTOP", 1, 2), watchdog_seconds=0) as job:
        job.until("made 2", 1, "err")
        time.sleep(1)  # rank 0 is in the collective of step 3, where Python handles no signal
        job.send(0, signal.SIGINT)
        time.sleep(0.5)
        job.send(0, signal.SIGINT)
        (ended,) = job.end([0], seconds=SOON)
    assert ended.status == 130 and "second Ctrl-C" in ended.err


ALONE = Runtime(torch.device("cpu"), torch.float32, torch.float32)


def test_a_process_that_goes_on_is_left_alone(tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr("forge.resilience.watchdog.end_process", lambda line, status: ends.append(line))
    with watch(ALONE, 0.4, tmp_path) as watchdog:
        time.sleep(0.8)  # before the first beat nothing is watched: a start takes as long as it takes
        for _ in range(8):
            watchdog.beat("busy")
            time.sleep(0.1)
        assert ends == [] and list(tmp_path.iterdir()) == []
        while not ends:
            time.sleep(0.02)
    assert "hung for" in ends[0] and "busy" in ends[0] and "test_watchdog.py" in ends[0]


def test_alone_an_error_is_passed_on_as_it_is(tmp_path):
    with pytest.raises(ValueError, match="mine"), watch(ALONE, None, tmp_path):
        raise ValueError("mine")
