"""A step made again is the step that was made; what is not is found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

import forge.training.replay as replay
from forge.checkpoint import list_checkpoints
from forge.checkpoint.save import describe_file, write_manifest
from forge.config import CheckpointConfig, Cosine, Muon
from forge.errors import CheckpointError, RunError
from forge.training import run_training
from forge.training.replay import replay_step
from tests.training.test_entry import TRAIN, _rolling, _with_data, _without_targets, small_job


@pytest.fixture
def job(tmp_path):
    return small_job(tmp_path)


@pytest.fixture
def finished(job):
    """A run of 6 steps, then of 9 under another schedule, with checkpoints at 3, 6 and 9; every step is logged."""
    job = evolve(job, scheduler=Cosine(warmup_steps=2), checkpoint=CheckpointConfig(interval=3, keep_last_n=9))
    run_training(evolve(job, train=evolve(TRAIN, steps=6)))
    run_training(evolve(job, train=evolve(TRAIN, steps=9)))
    return Path(job.run_dir)


def _replayed(*args):
    lines: list[str] = []
    return replay_step(*args, report=lines.append), lines


def _content(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("step", "first", "tensors"), [(-1, "7 to 9 from step_00000006", 1), (6, "4 to 6 from step_00000003", 1),
                                   (5, "4 to 5 from step_00000003", 0), (3, "1 to 3 from the initial weights", 1)],
)  # fmt: skip
def test_every_step_of_a_resumed_run_is_reproduced(finished, step, first, tensors):
    before = _content(finished)
    equal, lines = _replayed(finished, step)
    assert equal, lines
    assert first in lines[0] and len([line for line in lines if "tensors: equal" in line]) == tensors
    assert sum(": loss" in line for line in lines) == sum(": grad_norm" in line for line in lines) > 0
    assert _content(finished) == before


def test_a_stretch_over_a_resume_uses_the_config_of_each_side(finished):
    """Cosine over 6 steps, then over 9: with the checkpoint at 6 gone, steps 4 to 6 still decay to the end."""
    shutil.rmtree(finished / "checkpoints" / "step_00000006")
    equal, lines = _replayed(finished, 9)
    assert equal and "steps 4 to 9 from step_00000003" in lines[0]


def test_a_run_that_rolled_back_is_reproduced_on_both_sides_of_the_jump(job, monkeypatch):
    _with_data(monkeypatch, _without_targets(7, 8, 9))
    job = evolve(_rolling(job, max_rollbacks=1), checkpoint=CheckpointConfig(interval=3, keep_last_n=9))
    run_training(job)
    for step in (6, 9, 12):
        assert _replayed(job.run_dir, step)[0]
    provenance = Path(job.run_dir, "provenance.jsonl")
    provenance.write_text(provenance.read_text().replace("[[6, 4]]", "[[6, 5]]"))
    assert not _replayed(job.run_dir, 9)[0]


def test_a_flipped_bit_in_a_checkpoint_is_named(finished):
    """The checksums are those of the flipped file: corruption that came before the save."""
    path = finished / "checkpoints" / "step_00000009"
    params = load_file(path / "params.safetensors")
    params["head.weight"].view(torch.int32).view(-1)[5] ^= 1
    save_file(params, path / "params.safetensors", metadata={"format": "pt"})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["params.safetensors"] = describe_file(path / "params.safetensors")
    write_manifest(path, manifest)
    equal, lines = _replayed(finished, 9)
    assert not equal
    assert [line.split(" by ")[0] for line in lines if "DIFFERENT" in line] == [
        "step_00000009: params/head.weight: DIFFERENT"
    ]


def test_a_logged_value_that_is_not_reproduced_is_named(finished):
    metrics = finished / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["step"] == 5:
            line["train/grad_norm"] *= 1 + 1e-7
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    equal, said = _replayed(finished, 5)
    assert not equal
    (different,) = [line for line in said if "DIFFERENT" in line]
    assert different.startswith("step 5: grad_norm")


def test_skipped_updates_with_a_nan_are_reproduced(job, monkeypatch):
    job = evolve(job, optimizer=Muon(lr=1e30, adam_lr=1e30), train=evolve(TRAIN, max_consecutive_skips=100))
    run_training(job)
    equal, lines = _replayed(job.run_dir, 8)
    assert equal and any("nan" in line for line in lines)


def test_a_step_of_which_nothing_was_recorded_is_refused_with_the_nearest(job):
    run_training(evolve(job, metrics=evolve(job.metrics, log_interval=4)))
    with pytest.raises(RunError, match=r"step 5 was neither logged nor saved: .*nearest step that was is 4"):
        replay_step(job.run_dir, 5)
    with pytest.raises(RunError, match="step 9 was neither"):
        replay_step(job.run_dir, 9)


def test_a_run_from_before_provenance_is_replayed_with_its_config(job):
    run_training(job)
    Path(job.run_dir, "provenance.jsonl").unlink()
    assert _replayed(job.run_dir, 6)[0]


def test_other_software_is_said_and_another_number_of_processes_refused(finished, monkeypatch):
    monkeypatch.setattr(replay, "software", lambda: {"torch": "9.9"})
    equal, lines = _replayed(finished, 9)
    assert equal and any(line == f"note: torch was {torch.__version__}, is 9.9" for line in lines)
    provenance = finished / "provenance.jsonl"
    provenance.write_text(provenance.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(RunError, match="made by 4 processes, and 1 round otherwise: torchrun --nproc-per-node 4"):
        replay_step(finished, 9)


def test_a_damaged_checkpoint_is_passed_over_before_and_refused_at_the_step(finished):
    for step, error in ((6, None), (9, CheckpointError)):
        file = finished / "checkpoints" / f"step_{step:08d}" / "params.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        if error is None:
            assert "from step_00000003" in _replayed(finished, 9)[1][0]
        else:
            with pytest.raises(error, match=r"step_00000009/params\.safetensors: damaged"):
                replay_step(finished, 9)


def test_other_data_are_refused(finished):
    (finished.parent / "text" / "0.txt").write_text("other text " * 200)
    with pytest.raises(CheckpointError, match="trained on other tokens"):
        replay_step(finished, 9)


def test_a_folder_that_is_no_run_is_refused(tmp_path, finished):
    with pytest.raises(CheckpointError, match="no run here"):
        replay_step(tmp_path / "nothing")
    for path in list_checkpoints(finished / "checkpoints"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="no checkpoint here: name a logged step"):
        replay_step(finished)
    assert _replayed(finished, 4)[0], "logged values alone are compared too"
