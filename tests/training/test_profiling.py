"""A window of steps under the profiler: exactly those steps, in a file, and never the end of a run."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import record_function

from forge.config import ProfilingConfig
from forge.training.profiling import profile_window


def _run(config, folder, steps):
    with profile_window(config, folder) as before_step:
        for step in steps:
            before_step(step)
            with record_function(f"my step {step}"):
                torch.ones(2).sum()


def _recorded(file):
    events = json.loads(file.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("my step")}


@pytest.mark.parametrize(
    ("steps", "name", "recorded"),
    [
        (range(1, 9), "steps_3_5.json", {3, 4, 5}),
        (range(4, 9), "steps_4_5.json", {4, 5}),  # resumed within the window
        (range(1, 5), "steps_3_4.json", {3, 4}),  # ended within it
    ],
)
def test_the_file_holds_the_steps_of_the_window_that_were_taken(tmp_path, steps, name, recorded):
    _run(ProfilingConfig(start_step=3, steps=3), tmp_path / "profile", steps)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [name]
    assert _recorded(tmp_path / "profile" / name) == {f"my step {step}" for step in recorded}


@pytest.mark.parametrize("config", [ProfilingConfig(), ProfilingConfig(start_step=90, steps=2)])
def test_without_a_step_in_the_window_nothing_is_written(tmp_path, config):
    _run(config, tmp_path / "profile", range(1, 30))
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_in_the_window_keeps_its_recording_and_its_exception(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        profile_window(ProfilingConfig(start_step=1, steps=9), tmp_path) as before_step,
    ):
        before_step(1)
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["steps_1_1.json"]


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    _run(ProfilingConfig(start_step=1, steps=1), tmp_path / "file" / "profile", range(1, 3))
    assert "the profile cannot be written" in capsys.readouterr().err
