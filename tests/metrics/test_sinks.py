"""Sinks: what is written, and that a resumed run leaves no ghosts."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import forge.metrics.sinks
from forge.config import JobConfig, MetricsConfig, flatten_config
from forge.errors import ConfigError, RunError
from forge.metrics import ConsoleSink, JsonlSink, TensorBoardSink, WandbSink, build_sinks


def _strict_lines(path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def _scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """Every scalar in the raw event files, in the order of the files."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return found


def _log(sink, steps, value) -> None:
    for step in steps:
        sink.log(step, {"train/loss": value(step)})
    sink.close()


def test_a_line_is_strict_json_and_on_the_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl", 0)
    sink.log(3, {"train/loss": 2.5, "train/skipped": 0, "a": math.nan, "b": math.inf, "c": -math.inf})
    line = {"step": 3, "train/loss": 2.5, "train/skipped": 0, "a": "nan", "b": "inf", "c": "-inf"}
    assert _strict_lines(tmp_path / "deep" / "metrics.jsonl") == [line]
    sink.close()


def test_metrics_jsonl_has_one_value_a_step_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _log(JsonlSink(path, 0), range(1, 131), float)
    _log(JsonlSink(path, 100), range(101, 151), lambda step: step + 0.5)
    lines = _strict_lines(path)
    assert [line["step"] for line in lines] == list(range(1, 151))
    assert [line["train/loss"] for line in lines] == [*map(float, range(1, 101)), *(s + 0.5 for s in range(101, 151))]


@pytest.mark.parametrize("keep", [1, 14, 26])
def test_a_half_written_line_is_dropped(tmp_path, keep):
    path = tmp_path / "metrics.jsonl"
    _log(JsonlSink(path, 0), [1, 2], float)
    whole = path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    path.write_bytes(whole[: len(first) + keep])
    _log(JsonlSink(path, 2), [3], float)
    assert [line["step"] for line in _strict_lines(path)] == [1, 3]


def test_a_last_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 1.0}\n{"step": 2, "train/loss": 2.0}')
    _log(JsonlSink(path, 2), [3], float)
    assert [line["step"] for line in _strict_lines(path)] == [1, 2, 3]


def test_a_run_from_the_start_keeps_nothing_of_an_old_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _log(JsonlSink(path, 0), [0, 1, 2], float)
    _log(JsonlSink(path, 0), [0], lambda _: 7.0)
    assert _strict_lines(path) == [{"step": 0, "train/loss": 7.0}]


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_step_evaluated_again_after_a_resume_has_one_value(tmp_path, kind):
    place = tmp_path / ("metrics.jsonl" if kind == "jsonl" else "tensorboard")
    build = JsonlSink if kind == "jsonl" else TensorBoardSink
    for resume_step in (0, 10):
        sink = build(place, resume_step)
        sink.log(10, {"train/loss": 1.0 + resume_step})
        sink.log(10, {"eval/loss": 2.0 + resume_step})
        sink.close()
    if kind == "jsonl":
        assert _strict_lines(place) == [{"step": 10, "train/loss": 1.0}, {"step": 10, "eval/loss": 2.0}]
    else:
        assert _scalars(place) == {"train/loss": [(10, 1.0)], "eval/loss": [(10, 2.0)]}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6), st.data())
def test_any_chain_of_resumes_leaves_the_run_without_interruption(tmp_path_factory, attempts, data):
    path = tmp_path_factory.mktemp("chain") / "metrics.jsonl"
    reached = 0
    for back, steps in attempts:
        start = max(0, reached - back)
        sink = JsonlSink(path, start)
        for step in range(start + 1, start + steps + 1):
            sink.log(step, {"train/loss": float(step)})
            if step % 2 == 0:
                sink.log(step, {"eval/loss": float(-step)})
        sink.close()
        reached = start + steps
        if data.draw(st.booleans()):  # a kill in the middle of the next line
            path.write_bytes(path.read_bytes() + b'{"step": 4, "tra')
    JsonlSink(path, reached).close()
    lines = _strict_lines(path)
    pairs = [(line["step"], key) for line in lines for key in line if key != "step"]
    assert sorted(pairs) == sorted(
        [(s, "train/loss") for s in range(1, reached + 1)] + [(s, "eval/loss") for s in range(2, reached + 1, 2)]
    )


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    for build in (JsonlSink, TensorBoardSink):
        with pytest.raises(RunError, match="file"):
            build(tmp_path / "file" / "below", 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_error_that_names_the_file(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    sink._file.close()
    sink._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written: No space left"):
        sink.log(1, {"train/loss": 1.0})
    sink.close()


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_kill_while_the_past_is_rewritten_loses_nothing_of_it(tmp_path, monkeypatch, kind):
    place = tmp_path / "metrics.jsonl" if kind == "jsonl" else tmp_path
    build = JsonlSink if kind == "jsonl" else TensorBoardSink
    _log(build(place, 0), range(1, 6), float)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        build(place, 3)
    if kind == "jsonl":
        assert [line["step"] for line in _strict_lines(place)] == [1, 2, 3, 4, 5]
    else:
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    build(place, 3).close()
    assert (_strict_lines(place)[-1]["step"] if kind == "jsonl" else _scalars(tmp_path)["train/loss"][-1][0]) == 3


def test_tensorboard_has_one_value_a_step_after_a_resume(tmp_path):
    _log(TensorBoardSink(tmp_path, 0), range(1, 131), float)
    _log(TensorBoardSink(tmp_path, 100), range(101, 151), lambda step: step + 0.5)
    _log(TensorBoardSink(tmp_path, 120), range(121, 141), lambda step: step + 0.75)
    wanted = [(s, float(s)) for s in range(1, 101)] + [(s, s + 0.5) for s in range(101, 121)]
    wanted += [(s, s + 0.75) for s in range(121, 141)]
    assert sorted(_scalars(tmp_path)["train/loss"]) == wanted
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert sorted((event.step, event.value) for event in events.Scalars("train/loss")) == wanted


def test_a_tensorboard_that_is_open_forgets_what_was_removed(tmp_path):
    _log(TensorBoardSink(tmp_path, 0), range(1, 6), float)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    time.sleep(1.1)  # TensorBoard reads files by name, which holds the second; a resume is never in the same one
    _log(TensorBoardSink(tmp_path, 2), range(3, 5), lambda step: step + 0.5)
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_a_half_written_event_is_dropped(tmp_path):
    _log(TensorBoardSink(tmp_path, 0), [1, 2, 3], float)
    file = next(tmp_path.glob("events*"))
    file.write_bytes(file.read_bytes()[:-5])
    _log(TensorBoardSink(tmp_path, 3), [4], float)
    assert sorted(_scalars(tmp_path)["train/loss"]) == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_tensorboard_shows_the_config_once(tmp_path):
    for resume_step in (0, 5, 5):
        sink = TensorBoardSink(tmp_path, resume_step)
        sink.hyperparameters({"optimizer.lr": 0.1, "data.path": "a|b"})
        sink.log(resume_step + 1, {"x": 1.0})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    texts = sorted(events.Tensors("config/text_summary"), key=lambda text: text.step)
    assert [text.step for text in texts] == [1, 6]
    assert "| optimizer.lr | 0.1 |\n| data.path | a\\|b |" in texts[0].tensor_proto.string_val[0].decode()


def test_tensorboard_takes_values_that_are_not_finite(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    sink.log(1, {"a": math.nan, "b": math.inf})
    sink.close()
    found = _scalars(tmp_path)
    assert math.isnan(found["a"][0][1]) and found["b"] == [(1, math.inf)]


@pytest.mark.parametrize("package", ["torch.utils.tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    build = {"wandb": lambda: WandbSink("p", tmp_path), "torch.utils.tensorboard": lambda: TensorBoardSink(tmp_path, 0)}
    with pytest.raises(ConfigError, match=f"pip install {package.rpartition('.')[2]}"):
        build[package]()


class _FakeWandb(SimpleNamespace):
    """Records what the sink asks of wandb, whose own `resume_from` needs a server."""

    def __init__(self) -> None:
        super().__init__(started=[], logged=[], told=[], finished=0)

    def init(self, **options):
        self.started.append(options)
        config = SimpleNamespace(update=lambda flat, allow_val_change: self.told.append(flat))
        return SimpleNamespace(
            id="abc", config=config, log=lambda metrics, step: self.logged.append((step, metrics)), finish=self.finish
        )

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_with_its_run_from_the_step_resumed_from(tmp_path, monkeypatch):
    wandb = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume_step in (0, 100):
        sink = WandbSink("project", tmp_path, resume_step)
        sink.hyperparameters({"optimizer.lr": 0.1})
        sink.log(resume_step + 1, {"train/loss": 1.0})
        sink.close()
    folder = {"project": "project", "dir": str(tmp_path)}
    assert wandb.started == [folder, folder | {"resume_from": "abc?_step=100"}]
    assert wandb.logged == [(1, {"train/loss": 1.0}), (101, {"train/loss": 1.0})]
    assert wandb.told == [{"optimizer.lr": 0.1}] * 2 and wandb.finished == 2


def test_wandb_that_nobody_has_logged_in_to_is_one_error(tmp_path, monkeypatch):
    class Refused(Exception):
        pass

    def init(**_):
        raise Refused("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Refused))
    with pytest.raises(ConfigError, match=r"wandb_project = 'p': No API key configured\. WANDB_MODE=offline keeps"):
        WandbSink("p", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wandb_offline_keeps_a_run_and_its_resumption_on_the_disk(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    for resume_step, key in ((0, "train/loss"), (1, "train/later")):
        sink = WandbSink("project", tmp_path, resume_step)
        sink.hyperparameters({"optimizer.lr": 0.1})
        sink.log(resume_step + 1, {key: 1.5})
        sink.close()
    id = (tmp_path / "wandb_run_id").read_text()
    first, second = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{id}.wandb"))
    deadline = time.monotonic() + 30
    while b"train/later" not in second.read_bytes():  # wandb's own process writes it
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert b"train/loss" in first.read_bytes() and b"optimizer.lr" in first.read_bytes()
    assert b"train/loss" not in second.read_bytes()


def test_the_console_shows_short_names_and_hides_what_is_for_curves():
    lines: list[str] = []
    sink = ConsoleSink(lines.append)
    sink.hyperparameters({"optimizer.lr": 0.1})
    sink.log(
        1000,
        {
            "train/grad_norm": 1.2,
            "train/loss": 2.34,
            "train/lr": 3e-4,
            "train/mfu": 0.523,
            "train/tokens_per_sec": 125e3,
        }
        | {"train/loss_ema": 2.4, "train/step_time_sec": 0.5, "train/skipped": 0.0, "memory/peak_gb": 71.2}
        | {"memory/total_gb": 80.0, "time/eval": 3.0},
    )
    sink.log(1000, {"eval/loss": 2.5})
    sink.log(1010, {"train/skipped": 2.0, "train/z_loss": 0.1})
    sink.close()
    assert lines == [
        "[step 1000] loss=2.34 | lr=3.00e-04 | grad_norm=1.2 | tok/s=125k | mfu=52.3% | mem=71.2/80GB | time/eval=3",
        "[step 1000] eval/loss=2.5",
        "[step 1010] skipped=2 | z_loss=0.1",
    ]


def test_the_config_chooses_the_sinks(tmp_path):
    config = JobConfig()
    sinks = build_sinks(config, tmp_path, resume_step=0)
    for sink in sinks:
        sink.hyperparameters(flatten_config(config))
        sink.log(1, {"train/loss": 1.0})
        sink.close()
    assert [type(sink) for sink in sinks] == [JsonlSink, TensorBoardSink]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
    assert (
        build_sinks(evolve(config, metrics=MetricsConfig(jsonl=False, tensorboard=False)), tmp_path, resume_step=0)
        == []
    )


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert build_sinks(JobConfig(), tmp_path, resume_step=0) == []
    assert not list(tmp_path.iterdir())


def test_tensorboard_comes_back_after_the_disk_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)  # the writer's thread dies aloud
    others = set(threading.enumerate())
    sink = TensorBoardSink(tmp_path, 0)
    sink.log(1, {"a": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(file.stat().st_size for file in tmp_path.iterdir()), before[1]))
    try:
        with pytest.raises(RunError, match="cannot be written"):
            sink.log(2, {"a": 2.0})
        for thread in set(threading.enumerate()) - others:
            thread.join(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with monkeypatch.context() as full, pytest.raises(RunError, match="No space left on device"):
        full.setattr(forge.metrics.sinks, "disk_usage", lambda path: SimpleNamespace(free=0))
        sink.log(3, {"a": 3.0})
    sink.log(4, {"a": 4.0})
    sink.close()
    assert _scalars(tmp_path) == {"a": [(1, 1.0), (4, 4.0)]}
