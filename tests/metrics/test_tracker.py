"""The tracker: which step a number is of, what time it is over, and that nothing waits for the device in between."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import DataConfig, DataSource, JobConfig, MetricsConfig, ModelConfig, TrainConfig
from forge.metrics import MetricsTracker, StepMetrics, estimate_model_flops_per_token
from forge.pytree import tree_leaves, tree_map

CONFIG = JobConfig(
    model=ModelConfig(dim=64, n_layers=1, n_heads=2, vocab_size=50, max_seq_len=128),
    train=TrainConfig(seq_len=32),
    metrics=MetricsConfig(log_interval=3, ema_decay=0.5, peak_tflops=1e-3),
)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, step, metrics) -> None:
        self.lines.append((step, dict(metrics)))

    def hyperparameters(self, flat) -> None:
        raise AssertionError("whoever opened the sink tells it the config")

    def close(self) -> None:
        self.closed += 1


def _tracker(config: JobConfig = CONFIG, **options) -> tuple[MetricsTracker, Recorder, Clock]:
    sink, clock = Recorder(), Clock()
    return MetricsTracker(config, sinks=[sink], clock=clock, **options), sink, clock


def _run(tracker: MetricsTracker, clock: Clock, steps, seconds=lambda _: 2.0, tokens=100, loss=float, **options):
    """Take steps that last `seconds(step)`; returns what `end_step` gave."""
    given = []
    for step in steps:
        tracker.start_step()
        clock.now += seconds(step)
        given.append(tracker.end_step(step, loss(step), 0.1 * step, 1e-3 * step, tokens, **options))
    return given


def test_metrics_come_on_logging_steps_only():
    tracker, sink, clock = _tracker()
    given = _run(tracker, clock, range(1, 8))
    assert [step for step, found in enumerate(given, start=1) if found is not None] == [3, 6]
    assert [step for step, _ in sink.lines] == [3, 6]


def test_loss_norm_and_lr_are_those_of_the_step_itself():
    tracker, sink, clock = _tracker()
    found = _run(tracker, clock, range(1, 7))[-1]
    line = sink.lines[-1][1]
    assert (found.loss, found.grad_norm, found.lr) == (6.0, 0.1 * 6, 1e-3 * 6)
    assert (line["train/loss"], line["train/grad_norm"], line["train/lr"]) == (6.0, 0.1 * 6, 1e-3 * 6)


def test_sources_have_their_loss_and_tokens_of_the_whole_window_without_skipped_updates():
    sources = (DataSource("web", "x"), DataSource("code", "y"), DataSource("late", "z"))
    tracker, sink, clock = _tracker(evolve(CONFIG, data=DataConfig(sources=sources)))
    sums = {1: ((6.0, 1.0, 0.0), (2, 1, 0)), 2: ((math.nan, 1.0, 0.0), (5, 1, 0)), 3: ((0.0, 9.0, 0.0), (0, 4, 0))}
    for step, (loss, tokens) in sums.items():
        by_source = (torch.tensor(loss), torch.tensor(tokens))
        _run(tracker, clock, [step], by_source=by_source, skipped=torch.tensor(step == 2))
    found = {key: value for key, value in sink.lines[-1][1].items() if key.count("/") == 2}
    assert found == {
        "train/loss/web": 3.0, "train/tokens/web": 2, "train/loss/code": 2.0, "train/tokens/code": 5,
        "train/tokens/late": 0,
    }  # fmt: skip
    _run(tracker, clock, [4, 5, 6])
    assert not [key for key in sink.lines[-1][1] if key.count("/") == 2]


def test_the_wait_for_data_is_reported_as_its_mean_over_the_window():
    tracker, sink, clock = _tracker()
    for step in range(1, 7):
        with tracker.waiting_for_data():
            clock.now += 0.25 * step
        _run(tracker, clock, [step])
    assert [line["train/data_seconds"] for _, line in sink.lines] == [0.5, 1.25]


def test_the_first_step_is_in_no_rate():
    tracker, _, clock = _tracker()
    first, second = _run(tracker, clock, range(1, 7), seconds=lambda step: 500.0 if step == 1 else 2.0)[2::3]
    assert first.tokens_per_sec == second.tokens_per_sec == 50.0
    assert first.step_time_sec == second.step_time_sec == 2.0


def test_a_window_of_the_first_step_alone_has_its_time_and_no_rate():
    tracker, sink, clock = _tracker(evolve(CONFIG, metrics=evolve(CONFIG.metrics, log_interval=1)))
    first, second = _run(tracker, clock, [1, 2], seconds=lambda step: 500.0 if step == 1 else 2.0)
    assert (first.step_time_sec, first.tokens_per_sec, first.mfu) == (500.0, 0.0, 0.0)
    assert "train/tokens_per_sec" not in sink.lines[0][1] and "train/mfu" not in sink.lines[0][1]
    assert (second.step_time_sec, second.tokens_per_sec) == (2.0, 50.0)


def test_what_happens_before_the_first_step_is_not_its_time():
    tracker, _, clock = _tracker()
    clock.now += 1000
    assert _run(tracker, clock, [1], force=True)[0].step_time_sec == 2.0


def test_the_first_step_of_a_resumed_process_is_in_no_rate_either():
    tracker, _, clock = _tracker()
    found = _run(tracker, clock, range(101, 106), seconds=lambda step: 500.0 if step == 101 else 2.0)
    assert found[1].tokens_per_sec == 50.0  # step 102


def test_waiting_for_data_counts():
    tracker, _, clock = _tracker()
    _run(tracker, clock, range(1, 4))
    for step in range(4, 7):
        clock.now += 2.0  # the batch is late
        found = _run(tracker, clock, [step])[0]
    assert (found.tokens_per_sec, found.step_time_sec) == (25.0, 4.0)


def test_evaluation_and_checkpoints_are_left_out_and_reported_apart():
    tracker, sink, clock = _tracker()
    _run(tracker, clock, range(1, 4))
    with tracker.excluded("eval"):
        clock.now += 40
    _run(tracker, clock, [4])
    with tracker.excluded("checkpoint"):
        clock.now += 7
    assert _run(tracker, clock, [5, 6])[-1].tokens_per_sec == 50.0
    line = sink.lines[-1][1]
    assert (line["time/eval"], line["time/checkpoint"]) == (40, 7)
    _run(tracker, clock, [7, 8, 9])
    assert not [key for key in sink.lines[-1][1] if key.startswith("time/")]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 1000), st.floats(0, 10)), min_size=2, max_size=12),
    st.integers(1, 4),
)
def test_tokens_a_second_are_the_tokens_of_the_window_over_its_time(steps, interval):
    tracker, _, clock = _tracker(evolve(CONFIG, metrics=evolve(CONFIG.metrics, log_interval=interval)))
    window: list[tuple[float, int]] = []
    for step, (seconds, tokens, apart) in enumerate(steps, start=1):
        with tracker.excluded("eval"):
            clock.now += apart
        found = _run(tracker, clock, [step], lambda _, seconds=seconds: seconds, torch.tensor(tokens))[0]
        if step > 1:
            window.append((seconds, tokens))
        if found is not None:
            if window:
                rate = sum(tokens for _, tokens in window) / sum(seconds for seconds, _ in window)
                assert found.tokens_per_sec == pytest.approx(rate, rel=1e-6)
            window = []


def test_mfu_is_of_the_sequence_length_trained_on_and_all_devices():
    tracker, sink, clock = _tracker(num_gpus=4, gpu_peak_tflops=0.5)
    found = _run(tracker, clock, [1, 2, 3])[-1]
    assert found.mfu == pytest.approx(50.0 * estimate_model_flops_per_token(CONFIG.model, 32) / (4 * 0.5e12))
    assert sink.lines[-1][1]["train/mfu"] == found.mfu


def test_the_peak_is_given_or_configured_or_measured():
    given, configured = (_tracker(gpu_peak_tflops=peak) for peak in (2e-3, None))
    found = [_run(tracker, clock, [1, 2, 3])[-1].mfu for tracker, _, clock in (given, configured)]
    assert found[1] == pytest.approx(2 * found[0])
    measured, _, clock = _tracker(evolve(CONFIG, metrics=evolve(CONFIG.metrics, peak_tflops=None)))
    assert _run(measured, clock, [1, 2, 3])[-1].mfu > 0


def test_nothing_is_read_from_the_device_between_logging_steps():
    class Waiting(torch.Tensor):
        reads = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__):
                Waiting.reads += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    def value(number: float) -> Waiting:
        return torch.tensor(number).as_subclass(Waiting)

    tracker, _, _ = _tracker()
    for step in (1, 2):
        assert (
            tracker.end_step(step, value(2.0), value(1.0), value(1e-3), value(5.0), skipped=value(0.0), aux=value(1.0))
            is None
        )
    assert Waiting.reads == 0
    tracker.end_step(3, value(2.0), value(1.0), value(1e-3), value(5.0), skipped=value(0.0), aux=value(1.0))
    assert Waiting.reads > 0


def test_tensors_and_floats_give_the_same_metrics():
    lines = []
    for kind in (float, lambda number: torch.tensor(number, dtype=torch.float64)):
        tracker, sink, clock = _tracker()
        for step in range(1, 4):
            clock.now += 1
            tracker.end_step(step, kind(step), kind(0.5), kind(1e-3), kind(7), skipped=kind(step == 2), z=kind(0.25))
        lines.append({key: value for key, value in sink.lines[0][1].items() if not key.startswith("memory/")})
    assert lines[0] == lines[1]
    assert all(type(value) is float for value in lines[1].values())


def test_skipped_updates_of_the_window_are_counted():
    tracker, sink, clock = _tracker()
    for step in range(1, 7):
        clock.now += 1
        tracker.end_step(step, 1.0, 1.0, 1.0, 1, skipped=torch.tensor(step in (2, 3, 5)))
    assert [line["train/skipped"] for _, line in sink.lines] == [2, 1]
    assert tracker.end_step(9, 1.0, 1.0, 1.0, 1) is not None
    assert "train/skipped" not in sink.lines[-1][1]


def test_extras_are_logged_beside_the_loss():
    tracker, sink, clock = _tracker()
    _run(tracker, clock, [1, 2, 3], z_loss=torch.tensor(0.5), dropped=2)
    assert (sink.lines[0][1]["train/z_loss"], sink.lines[0][1]["train/dropped"]) == (0.5, 2.0)


def test_a_line_has_memory_and_the_same_numbers_as_the_step_metrics():
    tracker, sink, clock = _tracker()
    found, line = _run(tracker, clock, [1, 2, 3])[-1], sink.lines[0][1]
    for key in ("allocated_gb", "peak_gb", "reserved_gb", "total_gb"):
        assert line[f"memory/{key}"] == getattr(found, key) > 0
    assert line["memory/utilization"] == found.mem_utilization == found.peak_gb / found.total_gb
    for key in ("loss", "grad_norm", "lr", "tokens_per_sec", "mfu", "step_time_sec"):
        assert line[f"train/{key}"] == getattr(found, key)


def test_the_smoothed_loss_is_over_updates_and_bias_corrected():
    tracker, sink, clock = _tracker()
    _run(tracker, clock, [1, 2, 3])
    weights = (0.125, 0.25, 0.5)  # (1 - d) d^age at d = 1/2, for updates 1, 2, 3
    assert sink.lines[0][1]["train/loss_ema"] == pytest.approx((0.125 * 1 + 0.25 * 2 + 0.5 * 3) / sum(weights))
    constant, lines, clock = _tracker()
    _run(constant, clock, range(1, 7), loss=lambda _: 4.0)
    assert [line["train/loss_ema"] for _, line in lines.lines] == pytest.approx([4.0, 4.0])


def test_a_loss_that_is_not_finite_does_not_stay_in_the_smoothed_one():
    tracker, sink, clock = _tracker()
    _run(tracker, clock, range(1, 4), loss=lambda step: math.inf if step == 2 else math.nan if step == 3 else 4.0)
    assert math.isnan(sink.lines[0][1]["train/loss"])
    assert sink.lines[0][1]["train/loss_ema"] == 4.0
    hopeless, lines, clock = _tracker()
    _run(hopeless, clock, range(1, 4), loss=lambda _: math.nan)
    assert "train/loss_ema" not in lines.lines[0][1]


@settings(deadline=None)
@given(st.integers(1, 11), st.lists(st.floats(0, 10, width=32), min_size=12, max_size=12))
def test_the_smoothed_loss_survives_a_resume_at_any_step(cut, losses):
    whole, sink, clock = _tracker()
    _run(whole, clock, range(1, 13), loss=lambda step: torch.tensor(losses[step - 1]))
    before, _, clock = _tracker()
    _run(before, clock, range(1, cut + 1), loss=lambda step: torch.tensor(losses[step - 1]))
    after, resumed, clock = _tracker(ema_state=tuple(json.loads(json.dumps(before.ema_state()))))
    _run(after, clock, range(cut + 1, 13), loss=lambda step: torch.tensor(losses[step - 1]))
    assert resumed.lines[-1][1]["train/loss_ema"] == sink.lines[-1][1]["train/loss_ema"]
    assert after.ema_state() == whole.ema_state()


def test_asking_for_the_smoothed_loss_changes_nothing():
    asked, one, clock = _tracker()
    for step in range(1, 7):
        asked.ema_state()
        _run(asked, clock, [step])
    plain, other, clock = _tracker()
    _run(plain, clock, range(1, 7))
    assert one.lines[-1][1]["train/loss_ema"] == other.lines[-1][1]["train/loss_ema"]


def test_the_last_step_can_be_logged_whatever_the_interval():
    tracker, sink, clock = _tracker()
    _run(tracker, clock, range(1, 5))
    found = tracker.end_step(5, 1.5, 1.0, 1.0, 1, force=True)
    assert found is not None and found.loss == 1.5
    assert [step for step, _ in sink.lines] == [3, 5]


def test_evaluations_go_to_the_sinks_with_their_step():
    tracker, sink, _ = _tracker()
    tracker.log_eval({"eval/loss": 2.0, "perplexity": 7.4}, 40)
    assert sink.lines == [(40, {"eval/loss": 2.0, "eval/perplexity": 7.4})]


def test_close_closes_each_sink_once():
    tracker, sink, _ = _tracker()
    tracker.close()
    tracker.close()
    assert sink.closed == 1


def test_a_sink_that_fails_to_close_leaves_none_open():
    class Failing(Recorder):
        def close(self) -> None:
            raise OSError("gone")

    before, after = Recorder(), Recorder()
    tracker = MetricsTracker(CONFIG, sinks=[before, Failing(), after])
    with pytest.raises(OSError, match="gone"):
        tracker.close()
    assert (before.closed, after.closed) == (1, 1)


def test_backends_of_the_config_write_into_the_run_folder(tmp_path):
    config = evolve(CONFIG, run_dir=str(tmp_path / "run"))
    for resume_step in (0, 3):
        clock = Clock()
        tracker = MetricsTracker(config, clock=clock)
        tracker.init_backends(config, resume_step=resume_step)
        _run(tracker, clock, range(resume_step + 1, resume_step + 7))
        tracker.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 6, 9]
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2


def test_step_metrics_are_a_pytree_of_plain_floats():
    tracker, _, clock = _tracker()
    found = _run(tracker, clock, [1, 2, 3])[-1]
    assert len(tree_leaves(found)) == 12 and all(type(leaf) is float for leaf in tree_leaves(found))
    assert tree_map(lambda leaf: leaf * 0, found) == StepMetrics()
