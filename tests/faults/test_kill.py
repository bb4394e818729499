"""kill -9 at any moment, saves included: the run goes on, and ends as the one that was never touched, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve

from forge.checkpoint import list_checkpoints, verify_checkpoint
from forge.config import WSD, load_config, save_config
from tests.cli_job import write_job
from tests.faults.nursery import open_nursery
from tests.processes import as_ranks

KILLS = 40  # of one process: half of them while checkpoints are written in the background
IN_SAVES = 10
STEPS = 30
TIMES = {"train/tokens_per_sec", "train/mfu", "train/step_time_sec", "train/data_seconds"}
"""What no two runs log alike, with memory/ and time/."""


@pytest.fixture(scope="module")
def nursery():
    with open_nursery() as nursery:
        yield nursery


@pytest.fixture
def preset():
    """A job in a folder that costs no wait for a disk, so that kills meet training as often as saving."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield write_job(Path(folder))


class _Victim:
    """A run that can be started, killed, and started again."""

    def __init__(self, nursery, preset, name, ranks=1, tp=1, **checkpoint):
        job = load_config(preset)
        self.nursery, self.ranks, self.run_dir = nursery, ranks, preset.with_name(name)
        self.preset, self.log = preset.with_name(f"{name}.toml"), preset.with_name(f"{name}.log")
        self.root, self.pids = self.run_dir / "checkpoints", []
        job = evolve(
            job,
            run_dir=str(self.run_dir),
            train=evolve(job.train, steps=STEPS, global_batch_size=4, micro_batch_size=2),
            scheduler=WSD(warmup_steps=5),
            distributed=evolve(job.distributed, tp=tp),
            eval=evolve(job.eval, interval=10, sample_tokens=0),
            data=evolve(job.data, prefetch=3, workers=2),
            checkpoint=evolve(job.checkpoint, interval=3, keep_last_n=2, **checkpoint),
        )
        save_config(job, self.preset)

    def start(self):
        environments = as_ranks(self.ranks) if self.ranks > 1 else [{}]
        self.pids = [self.nursery.start(self.preset, self.log, environment) for environment in environments]

    def end(self):
        """Exit status of every rank."""
        return [self.nursery.wait(pid) for pid in self.pids]

    def half_done(self):
        """What a save, or the removal of an old checkpoint, has begun and not ended."""
        return [name for name in os.listdir(self.root) if name.startswith(".step_")] if self.root.exists() else []

    def saved(self):
        """Step of the newest checkpoint."""
        return max((int(path.name.removeprefix("step_")) for path in list_checkpoints(self.root)), default=0)

    def outcome(self):
        """Every bit that it left, but for times: the last checkpoint, and a line of metrics a step."""
        said = self.log.read_text()
        assert "Traceback" not in said and "damaged" not in said, said
        assert self.half_done() == []
        manifest = verify_checkpoint(list_checkpoints(self.root)[-1])
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        found = [((line["step"], key), value) for line in lines for key, value in line.items()]
        values = {at: value for at, value in found if at[1] not in TIMES and not at[1].startswith(("memory/", "time/"))}
        assert max(Counter(at for at, _ in found if at[1] != "step").values()) == 1, "one value a step"
        files = {name: entry["sha256"] for name, entry in manifest["files"].items() if name != "config.toml"}
        names = [path.name for path in list_checkpoints(self.root)]
        return names, manifest["step"], manifest["tokens"], manifest["notes"], files, values


def _straight(nursery, preset, **kind):
    """What a run leaves that nobody kills, and how long it takes."""
    run, began = _Victim(nursery, preset, "straight", **kind), time.monotonic()
    run.start()
    assert set(run.end()) == {0}, run.log.read_text()
    return run.outcome(), time.monotonic() - began


def _wait_for_a_save(run, moments):
    """Until a save has begun, and a moment longer; or until the run is about to end."""
    while not run.half_done() and run.saved() < STEPS:
        time.sleep(0.0003)
    time.sleep(moments.uniform(0, 0.006))


def _kill_once(run, moments, seconds, in_save):
    """Start the run and kill its processes, one a moment after another; whether that met it, and what a save left."""
    before = run.saved()
    run.start()
    time.sleep(moments.uniform(0, seconds / 3 if in_save else seconds))
    if in_save:
        _wait_for_a_save(run, moments)
    for pid in moments.sample(run.pids, len(run.pids)):
        os.kill(pid, signal.SIGKILL)
        time.sleep(moments.uniform(0, 0.02))
    killed = -signal.SIGKILL in run.end()
    assert run.saved() >= before, "a checkpoint was lost"
    return killed, run.half_done()


def _finish(run, expected):
    """Start the run a last time, from the newest checkpoint that it has."""
    saved = run.saved()
    said = len(run.log.read_text()) if run.log.exists() else 0
    run.start()
    assert set(run.end()) == {0}, run.log.read_text()
    line = re.search(r"resuming at step (\d+)|this run has finished all|starting", run.log.read_text()[said:])
    assert line is not None and (saved in (0, STEPS) or int(line[1]) == saved)
    assert run.outcome() == expected


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["saving", "saving in the background"])
def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(nursery, preset, background):
    moments = random.Random(17 + background)
    expected, seconds = _straight(nursery, preset, async_save=background)
    kills = in_saves = runs = 0
    run = None
    while kills < KILLS // 2 or in_saves < IN_SAVES // 2:
        if run is None:
            run, runs = _Victim(nursery, preset, f"killed-{runs}", async_save=background), runs + 1
        killed, half_done = _kill_once(run, moments, seconds, in_save=kills % 2 == 1)
        if killed:
            kills, in_saves = kills + 1, in_saves + bool(half_done)
        else:  # it was done before the moment came
            _finish(run, expected)
            run = None
        assert kills < 3 * KILLS, "hardly any kill met a save"
    if run is not None:
        _finish(run, expected)
    print(f"{kills} kills, {in_saves} of them during a save, of {runs} runs of {seconds:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_a_run_of_several_ranks_that_are_killed_ends_as_if_nothing_had_happened(nursery, preset, ranks, tp):
    moments = random.Random(5)
    expected, seconds = _straight(nursery, preset, ranks=ranks, tp=tp)
    run = _Victim(nursery, preset, "killed", ranks=ranks, tp=tp)
    met = [_kill_once(run, moments, seconds / 3, in_save=number > 0) for number in range(4)]
    assert all(killed for killed, _ in met) and any(half_done for _, half_done in met)
    _finish(run, expected)
