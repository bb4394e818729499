"""A disk that fills up during a run costs checkpoints and metrics of that time, never the run or what was saved."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from pathlib import Path

import pytest
from attrs import evolve

from forge.checkpoint import list_checkpoints, verify_checkpoint
from forge.config import CheckpointConfig
from forge.errors import CheckpointError
from forge.pytree import tree_equal
from forge.training import run_training
from forge.training.hooks import Hook
from tests.training.test_entry import TRAIN, _steps, small_job


@pytest.fixture
def job(tmp_path):
    job = small_job(tmp_path)
    quiet = evolve(job.metrics, tensorboard=False)  # its writer is a thread that dies aloud of a full disk
    return evolve(job, checkpoint=CheckpointConfig(interval=2), train=evolve(TRAIN, steps=12), metrics=quiet)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    except OSError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("only root may mount")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def _wait_for_checkpoint(run: Path, step: int) -> None:
    """Return once a save that goes on in the background has ended, so that a fault meets only the saves after it."""
    path = run / "checkpoints" / f"step_{step:08d}"
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written within a minute")


class _Fill(Hook):
    """Takes all that is left of a disk after update 3, and gives it back after update 7."""

    def __init__(self, disk: Path):
        self.rest, self.sound = disk / "rest", []

    def on_step_end(self, event):
        if event.step == 3:
            _wait_for_checkpoint(self.rest.parent / "run", 2)
            with contextlib.suppress(OSError), self.rest.open("wb", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
        if event.step == 7:
            self.sound = [
                verify_checkpoint(path)["step"] for path in list_checkpoints(self.rest.parent / "run" / "checkpoints")
            ]
            self.rest.unlink()


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_for_a_while_costs_only_the_checkpoints_of_that_time(job, small_disk, capsys, background):
    straight = run_training(job)
    checkpoint = evolve(job.checkpoint, async_save=background)
    fill = _Fill(small_disk)
    state = run_training(evolve(job, run_dir=str(small_disk / "run"), checkpoint=checkpoint), hooks=fill)
    assert tree_equal(state, straight)
    assert fill.sound == [2]
    said = capsys.readouterr().err
    assert "step_00000004: the checkpoint cannot be written" in said and "No space left on device" in said
    assert "training goes on, the checkpoints before it are kept" in said
    kept = [verify_checkpoint(path)["step"] for path in list_checkpoints(small_disk / "run" / "checkpoints")]
    assert kept == [10, 12]
    assert _steps(small_disk / "run") == _steps(job.run_dir), "the metrics of that time were written later"


class _Limit(Hook):
    """No file may grow beyond 20 kB after update 3, until update 7."""

    def __init__(self, run_dir: str, until=7):
        self.run, self.until, self.before = Path(run_dir), until, resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step_end(self, event):
        if event.step == 3:
            _wait_for_checkpoint(self.run, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, self.before[1]))
        if event.step == self.until:
            self.lift()

    def lift(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


@pytest.mark.parametrize("background", [False, True])
def test_writes_that_the_system_refuses_are_warnings_and_the_old_checkpoints_stay(job, capsys, background):
    job = evolve(job, checkpoint=evolve(job.checkpoint, async_save=background))
    limit = _Limit(job.run_dir)
    try:
        assert int(run_training(job, hooks=limit).step) == 12
    finally:
        limit.lift()
    said = capsys.readouterr().err
    assert "step_00000004: the checkpoint cannot be written" in said and "File too large" in said
    assert [path.name for path in Path(job.run_dir, "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("background", [False, True])
def test_where_the_last_checkpoint_cannot_be_written_the_run_says_so_and_the_newest_good_one_stays(job, background):
    job = evolve(job, checkpoint=evolve(job.checkpoint, async_save=background))
    limit = _Limit(job.run_dir, until=99)
    try:
        with pytest.raises(CheckpointError, match="step_00000012: the checkpoint cannot be written"):
            run_training(job, hooks=limit)
    finally:
        limit.lift()
    assert [verify_checkpoint(path)["step"] for path in list_checkpoints(Path(job.run_dir, "checkpoints"))] == [2]
