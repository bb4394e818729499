"""Reading a run folder: what a killed or running process has left counts as far as it is whole."""

from __future__ import annotations

import sys

import pytest

from forge.config import AdamW, JobConfig, flatten_config, save_config
from forge.errors import RunError
from forge.metrics import JsonlSink
from forge.report import read_run
from tests.report.runs import losses, write_run


@pytest.mark.parametrize("tail", ["", '{"step": 4, "tra', '{"step": 4, "train/loss": 1.0', "[1]\n", "\x00\n"])
def test_a_line_that_is_half_written_is_left_out(tmp_path, tail):
    run = read_run(write_run(tmp_path / "a", losses([1, 2, 3], float), tail=tail))
    assert run.curves["train/loss"].points() == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_what_the_sink_writes_is_what_is_read(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    sink.log(1, {"train/loss": 0.1, "train/grad_norm": float("inf"), "train/skipped": 1})
    sink.log(2, {"train/loss": float("nan"), "train/grad_norm": 2.0, "train/skipped": 0})
    sink.log(2, {"eval/loss": 3.0})
    sink.close()
    run = read_run(tmp_path)
    assert {key: curve.points() for key, curve in run.curves.items()} == {
        "train/loss": [(1, 0.1)],
        "train/grad_norm": [(2, 2.0)],
        "train/skipped": [(1, 1.0), (2, 0.0)],
        "eval/loss": [(2, 3.0)],
    }
    assert run.not_finite == {"train/loss": 1, "train/grad_norm": 1}


def test_every_key_of_a_config_is_read(tmp_path):
    config = JobConfig(optimizer=AdamW(lr=0.25))
    write_run(tmp_path / "a", losses([1], float))
    save_config(config, tmp_path / "a" / "config.toml")
    assert read_run(tmp_path / "a").config == {key: str(value) for key, value in flatten_config(config).items()}


def test_samples_come_by_step_and_a_later_one_of_a_step_counts(tmp_path):
    run = read_run(write_run(tmp_path / "a", [], samples=[(20, "old"), (10, "ten"), (20, "new")]))
    assert [(sample.step, sample.text) for sample in run.samples] == [(10, "ten"), (20, "new")]


def test_a_folder_without_metrics_is_one_error(tmp_path):
    with pytest.raises(RunError, match=r"no metrics\.jsonl here"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(("name", "content"), [("config.toml", b"a = "), ("config.toml", b"\xff")])
def test_a_damaged_config_is_one_error_that_names_the_file(tmp_path, name, content):
    folder = write_run(tmp_path / "a", losses([1], float))
    (folder / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"a/{name}: (not valid TOML|cannot be read)"):
        read_run(folder)


def test_the_report_needs_no_torch():
    import subprocess

    code = "import sys, forge.report; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
