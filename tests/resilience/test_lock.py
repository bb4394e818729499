"""One process at a time in a run folder, and no trace of a run that was refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forge.errors import RunError
from forge.resilience import lock_run

HOLD = "import sys; from pathlib import Path; from forge.resilience import lock_run\nwith lock_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_second_process_is_refused_and_a_dead_one_lets_go(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="another process is training in it"), lock_run(folder):
            pass
        other.kill()
        other.wait()
        with lock_run(folder):
            pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunError, match="file/run: the run folder cannot be written"),
        lock_run(tmp_path / "file" / "run"),
    ):
        pass


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path):
    with lock_run(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists() and tmp_path.exists()
    with lock_run(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.toml").write_text("")
    assert (tmp_path / "a" / "b" / "config.toml").exists()
