"""A run folder says what made it: each start one line, and which line governs an update."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from forge.config import JobConfig, TrainConfig, config_from_dict
from forge.errors import RunError
from forge.training.provenance import FILE, git_state, governing, read_starts, record_start
from forge.training.runtime import Runtime

RUNTIME = Runtime(torch.device("cpu"), torch.float32, torch.float32)
CONFIG = JobConfig(train=TrainConfig(seed=3, data_seed=4, grad_clip_norm=None))


def test_a_line_holds_what_is_needed_to_repeat_the_run(tmp_path):
    record_start(tmp_path, CONFIG, RUNTIME, step=0, jumps=[])
    record_start(tmp_path, CONFIG, RUNTIME, step=6, jumps=[[6, 4]])
    first, second = read_starts(tmp_path)
    assert (first["step"], first["jumps"], second["step"], second["jumps"]) == (0, [], 6, [[6, 4]])
    assert config_from_dict(first["config"]) == CONFIG
    assert (first["seed"], first["data_seed"], first["world_size"]) == (3, 4, 1)
    assert first["torch"] == torch.__version__ and first["command"] == sys.orig_argv
    assert first.keys() >= {
        "time",
        "host",
        "cwd",
        "cwd_git",
        "forge",
        "forge_git",
        "python",
        "cuda",
        "device",
        "threads",
    }
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_line_that_governs_an_update_is_the_last_that_began_before_it():
    """Started, resumed at 8, rolled back from 12 to 4, resumed at 6."""
    starts = [{"step": step, "is": name} for step, name in ((0, "a"), (8, "b"), (4, "c"), (6, "d"))]
    assert [governing(starts, update)["is"] for update in (1, 4, 5, 6, 7, 8, 9, 20)] == list("aaccdddd")


def test_a_run_from_before_has_no_lines_and_a_damaged_file_is_named(tmp_path):
    assert read_starts(tmp_path) == []
    (tmp_path / FILE).write_text("{")
    with pytest.raises(RunError, match=r"provenance\.jsonl: damaged"):
        read_starts(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"provenance\.jsonl: cannot be written: No such file"):
        record_start(tmp_path / "missing", CONFIG, RUNTIME, step=0, jumps=[])


def test_the_state_of_a_git_tree_is_its_commit_and_whether_it_was_changed(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x", *words], check=True, capture_output=True
        )

    git("init")
    assert git_state(tmp_path) == {"commit": "(initial)", "dirty": False}
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and not state["dirty"]
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_without_git_a_run_is_recorded_all_the_same(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    record_start(tmp_path, CONFIG, RUNTIME, step=0, jumps=[])
    assert read_starts(tmp_path)[0]["cwd_git"] is None
