"""A run: trains, resumes bit for bit, says what is wrong, and leaves what it promises in its folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.checkpoint import list_checkpoints, read_manifest
from forge.config import (
    WSD,
    AdamW,
    CheckpointConfig,
    Constant,
    Cosine,
    DataConfig,
    DataSource,
    EvalConfig,
    EvalSource,
    FreezeStage,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    MoEConfig,
    Muon,
    NoSchedule,
    ProfilingConfig,
    ScheduleFree,
    TrainConfig,
    save_config,
)
from forge.data import IteratorStream
from forge.data.batch import IGNORE
from forge.errors import CheckpointError, ConfigError, DataError, RunError, Stopped
from forge.pytree import tree_equal, tree_map
from forge.resilience import TooManySkips
from forge.training import data_pipeline, run_training
from forge.training.data_pipeline import build_data_pipeline, open_data
from forge.training.eval import run_eval_sets
from forge.training.hooks import Hook
from forge.training.reload import evaluate_run, load_run

MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=257, max_seq_len=16)
TRAIN = TrainConfig(steps=8, seq_len=16, global_batch_size=4, micro_batch_size=2)


@pytest.fixture
def job(tmp_path):
    return small_job(tmp_path)


def small_job(tmp_path):
    """A small job on a few documents of text, a few tenths of a second a run."""
    text = tmp_path / "text"
    text.mkdir()
    for n in range(8):
        (text / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    return JobConfig(
        run_dir=str(tmp_path / "run"),
        model=MODEL,
        train=TRAIN,
        optimizer=AdamW(lr=1e-2),
        scheduler=WSD(warmup_steps=2),
        data=DataConfig(path=str(text), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")),
        eval=EvalConfig(interval=4, batches=2, batch_size=2),
        checkpoint=CheckpointConfig(interval=3),
        metrics=MetricsConfig(log_interval=1, peak_tflops=0.1),
    )


def _steps(run_dir, key="train/loss") -> dict[int, float]:
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(line["step"], line[key]) for line in lines if key in line]
    assert len(found) == len(dict(found)), "one value for each step"
    return dict(found)


def _at(job, name):
    return evolve(job, run_dir=f"{job.run_dir}-{name}")


class _StopAfter(Hook):
    """Sends this process a signal after a step (once a later one was seen before), as an operator would."""

    def __init__(self, step, number=signal.SIGTERM, after=0):
        self.step, self.number, self.after, self.seen = step, number, after, 0

    def on_step_end(self, event):
        self.seen = max(self.seen, event.step)
        if event.step == self.step and self.seen >= self.after:
            os.kill(os.getpid(), self.number)


def test_a_run_leaves_config_metrics_events_and_the_last_checkpoint(job, capsys):
    state = run_training(job)
    run = job.run_dir
    assert int(state.step) == 8
    assert sorted(p.name for p in os.scandir(run)) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "provenance.jsonl",
        "tensorboard",
    ]
    assert [p.name for p in list_checkpoints(Path(run, "checkpoints"))] == ["step_00000006", "step_00000008"]
    assert list(_steps(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(_steps(run, "eval/loss")) == [4, 8]
    assert _steps(run)[8] < _steps(run)[1]
    out = capsys.readouterr().out
    assert "bits per byte" in out and "tensorboard --logdir" in out and "generate --run-dir" in out


def test_powers_of_two_are_saved_early_on_and_never_removed(job):
    run_training(evolve(job, checkpoint=CheckpointConfig(interval=3, keep_last_n=1, powers_of_two=5)))
    names = [path.name[-2:] for path in list_checkpoints(Path(job.run_dir, "checkpoints"))]
    assert names == ["01", "02", "04", "08"]


def _mixed(data):
    sources = (DataSource("a", data.path, 3.0), DataSource("b", f"{data.path}/[0-3].txt"))
    return evolve(data, sources=sources, anneal_start_step=4, anneal_weights={"b": 1.0}, anneal_lr_scale=0.5)


def test_what_routers_did_is_logged_and_only_where_there_are_any(job):
    run_training(_at(job, "dense"))
    assert not any(_steps(_at(job, "dense").run_dir, f"train/moe_{name}") for name in ("balance", "entropy", "dropped"))
    moe = MoEConfig(n_experts=4, expert_hidden_dim=16, capacity_factor=0.5)
    run_training(_at(evolve(job, model=evolve(MODEL, moe=moe)), "moe"))
    balance, entropy, dropped = (
        _steps(_at(job, "moe").run_dir, f"train/moe_{name}") for name in ("balance", "entropy", "dropped")
    )
    assert list(balance) == list(entropy) == list(dropped) == list(range(1, 9))
    assert all(1 <= value <= 4 / 2 for value in balance.values())  # two experts a token: the mean is half of all
    assert entropy[1] == pytest.approx(1.386, rel=1e-2)  # ln 4: the first weights tell the experts hardly apart
    assert all(0.5 <= value < 1 for value in dropped.values())


VARIANTS = {
    "adamw": lambda job: job,
    "muon": lambda job: evolve(job, optimizer=Muon(adam_lr=1e-2)),
    "schedule_free": lambda job: evolve(job, optimizer=ScheduleFree(warmup_steps=2), scheduler=NoSchedule()),
    "experts with a balancing bias": lambda job: evolve(
        job, model=evolve(MODEL, moe=MoEConfig(n_experts=4, router="sigmoid", expert_hidden_dim=16))
    ),
    "thawed on the way": lambda job: evolve(
        job,
        train=evolve(TRAIN, freeze=(FreezeStage(("blocks.0.*",)), FreezeStage(("blocks.0.*",), False, 4))),
    ),
    "two sources in two phases": lambda job: evolve(job, data=_mixed(job.data)),
    "bf16 weights": lambda job: evolve(job, train=evolve(TRAIN, param_dtype="bf16", precision="fp32")),
    "averaged": lambda job: evolve(job, train=evolve(TRAIN, ema_decay=0.7, spike_sigma=9.0, spike_window=3)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(job, variant, stop):
    job = VARIANTS[variant](job)
    straight = run_training(_at(job, "straight"))
    with pytest.raises(Stopped, match=f"saved step {stop}"):
        run_training(job, hooks=_StopAfter(stop))
    assert tree_equal(run_training(job), straight)
    assert _steps(job.run_dir) == _steps(_at(job, "straight").run_dir)
    assert _steps(job.run_dir, "train/loss_ema") == pytest.approx(
        _steps(_at(job, "straight").run_dir, "train/loss_ema")
    )


def _counting_text():
    """Six texts an epoch."""
    return IteratorStream(lambda start: (f"{n} and {n + 1} make {2 * n + 1}; " * 3 for n in range(start, 6)))


@pytest.mark.parametrize(("stop", "prefetch"), [(1, 0), (3, 2), (5, 4)])
def test_a_run_on_a_stream_stopped_and_resumed_equals_one_that_was_not(job, stop, prefetch):
    job = evolve(job, data=evolve(job.data, path="/unread", prefetch=prefetch), eval=EvalConfig(interval=0))
    straight = run_training(_at(job, "straight"), data=_counting_text())
    with pytest.raises(Stopped, match=f"saved step {stop}"):
        run_training(job, hooks=_StopAfter(stop), data=_counting_text())
    assert tree_equal(run_training(job, data=_counting_text()), straight)
    assert _steps(job.run_dir) == _steps(_at(job, "straight").run_dir)


def test_a_stream_is_evaluated_on_sets_of_ones_own_and_takes_the_place_of_no_other_data(job, tmp_path):
    with pytest.raises(DataError, match=r"name sets to evaluate on in \[\[eval.sets\]\]"):
        run_training(job, data=_counting_text())
    sets = (EvalSource("far", str(tmp_path / "text" / "0.txt")),)
    run_training(evolve(job, eval=evolve(job.eval, sets=sets)), data=_counting_text())
    assert _steps(job.run_dir, "eval/far/loss") == _steps(job.run_dir, "eval/loss")
    with pytest.raises(CheckpointError, match="trained on other tokens"):
        run_training(evolve(job, train=evolve(TRAIN, steps=12)))


def test_metrics_of_a_mixture_are_by_source_and_the_phase_scales_the_rate_after_a_resume_too(job):
    job = evolve(job, data=_mixed(job.data), scheduler=NoSchedule())
    with pytest.raises(Stopped, match="saved step 5"):
        run_training(job, hooks=_StopAfter(5))
    run_training(job)
    rates = [0.01] * 4 + [0.005] * 4
    assert list(_steps(job.run_dir, "train/lr").values()) == pytest.approx(rates)
    assert all(tokens > 0 for tokens in _steps(job.run_dir, "train/tokens/b").values())
    assert [tokens > 0 for tokens in _steps(job.run_dir, "train/tokens/a").values()] == [True] * 4 + [False] * 4
    assert list(_steps(job.run_dir, "train/loss/a")) == [1, 2, 3, 4]
    by_name = [_steps(job.run_dir, f"eval/{name}loss")[8] for name in ("", "a/", "b/")]
    assert min(by_name[1:]) < by_name[0] < max(by_name[1:])


def test_evaluating_logging_and_profiling_at_every_step_change_no_bit(job):
    quiet = evolve(
        _at(job, "quiet"), eval=EvalConfig(interval=0), checkpoint=CheckpointConfig(interval=0),
        metrics=evolve(job.metrics, log_interval=100),
    )  # fmt: skip
    loud = evolve(
        job, eval=evolve(job.eval, interval=1), checkpoint=CheckpointConfig(interval=1),
        profiling=ProfilingConfig(start_step=2, steps=2),
    )  # fmt: skip
    assert tree_equal(run_training(quiet), run_training(loud))
    assert os.listdir(f"{job.run_dir}/profile") == ["steps_2_3.json"]


def test_saving_in_the_background_gives_the_same_run(job):
    background = evolve(_at(job, "background"), checkpoint=evolve(job.checkpoint, async_save=True))
    straight = run_training(job)
    with pytest.raises(Stopped, match="saved step 5"):
        run_training(background, hooks=_StopAfter(5))
    assert tree_equal(run_training(background), straight)
    names = [[path.name for path in list_checkpoints(Path(run.run_dir, "checkpoints"))] for run in (job, background)]
    assert names[0] == names[1] == ["step_00000006", "step_00000008"]


def test_a_finished_run_says_so_and_more_steps_go_on(job, capsys):
    first = run_training(job)
    capsys.readouterr()
    assert tree_equal(run_training(job), first)
    assert "has finished all its 8 steps; --train.steps 16 would go on" in capsys.readouterr().out
    constant = evolve(job, train=evolve(TRAIN, steps=10))
    assert int(run_training(constant).step) == 10


@pytest.mark.parametrize(("scheduler", "jumps"), [(Cosine(), True), (Constant(warmup_steps=2), False)])
def test_more_steps_that_move_the_rate_are_warned_of(job, caplog, scheduler, jumps):
    job = evolve(job, scheduler=scheduler)
    run_training(job)
    assert "learning rate" not in caplog.text
    run_training(evolve(job, train=evolve(TRAIN, steps=16)))
    assert ("goes on at 0.00" in caplog.text and "which was 8 and is 16 now" in caplog.text) == jumps


def test_what_is_evaluated_of_a_run_with_an_average_is_the_average(job):
    job = evolve(job, train=evolve(TRAIN, ema_decay=0.9))
    state = run_training(job)
    trained = load_run(job.run_dir, device="cpu")
    used = trained.params()
    weights = [0.9**age for age in range(8)]
    assert float(state.extras["ema"]["weight"]) == pytest.approx(0.1 * sum(weights), rel=1e-5)
    assert not tree_equal(used, state.params)
    by_hand = evaluate_run(job.run_dir, batches=2, device="cpu")["eval/loss"]
    assert by_hand == pytest.approx(_steps(job.run_dir, "eval/loss")[8], rel=1e-5)
    last = run_eval_sets(
        trained.parts.eval_step, state.params, state.extras,
        open_data(trained.config, trained.parts.runtime).eval_sets, place=lambda batch: batch,
    )  # fmt: skip
    assert abs(last["eval/loss"] - by_hand) > 1e-4


def test_a_place_where_no_checkpoint_can_be_written_is_refused_before_the_first_step(job):
    Path(job.run_dir).mkdir()
    Path(job.run_dir, "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match=r"checkpoints: no checkpoint can be written there"):
        run_training(job)
    assert not Path(job.run_dir, "metrics.jsonl").exists()


def test_a_contradicting_config_is_refused_and_the_run_left_alone(job):
    run_training(job)
    before = sorted((p.path, p.stat().st_mtime_ns) for p in os.scandir(job.run_dir))
    with pytest.raises(CheckpointError, match=r"optimizer.lr = 0.01 there, 0.5 asked"):
        run_training(evolve(job, optimizer=AdamW(lr=0.5)))
    assert sorted((p.path, p.stat().st_mtime_ns) for p in os.scandir(job.run_dir)) == before


def test_resuming_on_other_tokens_is_refused(job, tmp_path):
    run_training(job)
    (tmp_path / "text" / "0.txt").write_text("other text " * 200)
    with pytest.raises(CheckpointError, match="trained on other tokens"):
        run_training(evolve(job, train=evolve(TRAIN, steps=12)))


KILLED = """
import os, sys
from forge.config import load_config
from forge.training import run_training
from forge.training.hooks import Hook

class Kill(Hook):
    def on_step_end(self, event):
        if event.step == 5:
            os.kill(os.getpid(), 9)

run_training(load_config(sys.argv[1]), hooks=Kill())
"""


def test_after_a_kill_the_run_goes_on_and_metrics_have_no_ghosts(job, tmp_path):
    save_config(job, tmp_path / "job.toml")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "job.toml")], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert max(_steps(job.run_dir)) == 5
    assert [path.name for path in list_checkpoints(Path(job.run_dir, "checkpoints"))] == ["step_00000003"]
    straight = run_training(_at(job, "straight"))
    assert tree_equal(run_training(job), straight)
    assert _steps(job.run_dir) == _steps(_at(job, "straight").run_dir)


def test_a_hook_sees_plain_values_and_every_event(job):
    seen = []

    class Watch(Hook):
        def on_train_begin(self, config, step):
            seen.append(("begin", step))

        def on_step_end(self, event):
            assert isinstance(event.loss, float) and not event.skipped
            seen.append(("step", event.step, event.lr))

        def on_eval_end(self, step, metrics):
            seen.append(("eval", step, metrics["eval/tokens"]))

        def on_checkpoint_save(self, step, path):
            assert (path / "manifest.json").exists()
            seen.append(("save", step))

        def on_train_end(self, step):
            seen.append(("end", step))

    run_training(job, hooks=[Watch()])
    assert [event[:2] for event in seen] == [
        ("begin", 0), ("step", 1), ("step", 2), ("step", 3), ("save", 3), ("step", 4), ("eval", 4), ("step", 5),
        ("step", 6), ("save", 6), ("step", 7), ("step", 8), ("eval", 8), ("save", 8), ("end", 8),
    ]  # fmt: skip
    assert [event[2] for event in seen if event[0] == "step"][:2] == pytest.approx([0.005, 0.01])


def test_a_hook_that_raises_stops_the_run_and_the_state_is_saved(job):
    class Broken(Hook):
        def on_step_end(self, event):
            if event.step == 5:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_training(job, hooks=Broken())
    assert os.path.isdir(f"{job.run_dir}/checkpoints/step_00000005")
    assert tree_equal(run_training(job), run_training(_at(job, "straight")))


def test_a_step_of_ones_own_replaces_the_whole_step(job):
    calls = []

    def my_step(state, batch):
        from forge.training.state import StepResult

        calls.append(batch.labels.shape)
        zero = torch.zeros(())
        params = tree_map(lambda p: p * 0.5, state.params)
        result = StepResult(zero, zero, zero, zero, zero, zero, torch.tensor(1), torch.tensor(False))
        return evolve(state, step=state.step + 1, params=params), result

    state = run_training(job, step_fn=my_step)
    assert calls == [(2, 2, 16)] * 8
    assert float(state.params["norm.weight"][0]) == 0.5**8


def test_too_many_skipped_updates_stop_the_run_with_the_last_good_state(job):
    job = evolve(job, optimizer=AdamW(lr=1e30), train=evolve(TRAIN, steps=40, max_consecutive_skips=3))
    with pytest.raises(RunError, match="updates in a row were skipped"):
        run_training(job)
    from forge.training.reload import load_run

    assert all(torch.isfinite(p).all() for p in load_run(job.run_dir).state.params.values())


def _with_data(monkeypatch, change):
    """Runs read `change(batch_at)`."""

    def changed(*args, **options):
        data = build_data_pipeline(*args, **options)
        return evolve(data, training=change(data.batch_at))

    monkeypatch.setattr(data_pipeline, "build_data_pipeline", changed)


def _without_targets(*indices):
    """The batches of these indices have no target: their updates are skipped."""

    def change(batch_at):
        def at(index):
            batch = batch_at(index)
            return evolve(batch, labels=torch.full_like(batch.labels, IGNORE)) if index in indices else batch

        return at

    return change


def test_skipped_updates_are_told_where_the_run_is_told(job, monkeypatch, capsys):
    _with_data(monkeypatch, _without_targets(2))
    run_training(job)
    said = capsys.readouterr().out
    assert re.search(r"\[step 3\].* skipped=1 ", said) and said.count("skipped=") == 1


def test_a_config_that_cannot_be_written_is_one_line(job):
    path = Path(job.run_dir) / "config.toml"
    path.mkdir(parents=True)
    with pytest.raises(RunError, match=r"config\.toml: cannot be written: .*; choose another --run-dir"):
        run_training(job)


def _rolling(job, **train):
    return evolve(job, train=evolve(TRAIN, **{"steps": 12, "max_consecutive_skips": 2, **train}))


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_rolls_back_equals_one_without_the_data_that_it_jumped_over(job, monkeypatch, capsys, background):
    """Batches 7 to 9 are bad: back from update 10 to the checkpoint at 6 (that of 9 lies among them), on with batch 10."""
    job = evolve(
        _rolling(job, max_rollbacks=1), checkpoint=CheckpointConfig(interval=3, keep_last_n=1, async_save=background)
    )
    _with_data(monkeypatch, lambda batch_at: lambda step: batch_at(step if step < 6 else step + 4))
    straight = run_training(_at(job, "straight"))
    _with_data(monkeypatch, _without_targets(7, 8, 9))
    with pytest.raises(Stopped, match="saved step 8"):
        run_training(job, hooks=_StopAfter(8, after=10))
    assert re.search(
        r"updates 8 to 10.*going back to step_00000006 and jumping over 4 batches", capsys.readouterr().err
    )
    assert [path.name for path in list_checkpoints(Path(job.run_dir, "checkpoints"))][-1] == "step_00000008"
    assert tree_equal(run_training(job), straight)
    assert _steps(job.run_dir) == _steps(_at(job, "straight").run_dir)
    assert read_manifest(Path(job.run_dir, "checkpoints", "step_00000012"))["notes"]["jumps"] == [[6, 4]]


def test_rollbacks_have_a_limit_and_the_good_checkpoints_stay(job, monkeypatch):
    _with_data(monkeypatch, _without_targets(*range(7, 13)))
    once = _rolling(_at(job, "once"), max_rollbacks=1)
    with pytest.raises(TooManySkips, match="updates 7 to 9"):
        run_training(once)
    names = [path.name for path in list_checkpoints(Path(once.run_dir, "checkpoints"))]
    assert names == ["step_00000003", "step_00000006"]
    twice = run_training(_rolling(job, max_rollbacks=2))
    _with_data(monkeypatch, lambda batch_at: lambda step: batch_at(step if step < 6 else step + 7))
    assert tree_equal(twice, run_training(_rolling(_at(job, "straight"))))


def test_without_a_checkpoint_before_the_bad_updates_a_rollback_says_so(job, monkeypatch):
    _with_data(monkeypatch, _without_targets(*range(1, 9)))
    with pytest.raises(RunError, match=r"no sound checkpoint is older than update 2; 3 updates in a row"):
        run_training(_rolling(job, max_rollbacks=1))


def test_a_failed_checkpoint_is_a_warning_in_the_middle_and_an_error_at_the_end(job, monkeypatch, capsys):
    import forge.training.saving as saving

    real, failed = saving.save_checkpoint, []

    def full(root, state, **options):
        if int(state.step) == 3:
            failed.append(3)
            raise CheckpointError("no space left on device")
        return real(root, state, **options)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    assert int(run_training(job).step) == 8 and failed == [3]
    assert "no space left on device; training goes on" in capsys.readouterr().err

    def always_full(root, state, **options):
        raise CheckpointError("no space left on device")

    monkeypatch.setattr(saving, "save_checkpoint", always_full)
    with pytest.raises(CheckpointError, match="no space left"):
        run_training(_at(job, "full"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda j: evolve(j, model=evolve(MODEL, vocab_size=200)), DataError, "200"),
        (lambda j: evolve(j, data=evolve(j.data, path="/nowhere/at/all")), DataError, "/nowhere/at/all"),
        (lambda j: evolve(j, model=evolve(MODEL, max_seq_len=99999), train=evolve(TRAIN, seq_len=99999)), DataError, "99999|100000"),
        (lambda j: evolve(j, data=evolve(j.data, tokenizer="/no/tokenizer.json")), DataError, "/no/tokenizer.json"),
        (lambda j: evolve(j, train=evolve(TRAIN, freeze=(FreezeStage(("blocks.9.*",)),))), ConfigError, "blocks.9"),
        (lambda j: evolve(j, distributed=evolve(j.distributed, tp=2)), ConfigError, r"tp 2 .*does not divide the 1 processes"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_leaves_no_run_folder(job, change, error, message):
    with pytest.raises(error, match=message) as caught:
        run_training(change(job))
    assert "\n" not in str(caught.value)
    assert not os.path.exists(job.run_dir)


def test_two_runs_in_one_process_do_not_touch_each_other(job):
    first = run_training(_at(job, "a"))
    torch.manual_seed(12345)
    assert tree_equal(run_training(_at(job, "b")), first)


@pytest.mark.parametrize("variant", ["adamw", "muon", "experts with a balancing bias"])
def test_a_deterministic_run_repeats_itself_to_the_bit(job, variant):
    """With evaluation and a sample of text, none of which may need a kernel that is refused."""
    job = evolve(VARIANTS[variant](job), eval=evolve(job.eval, sample_tokens=4))
    job = evolve(job, train=evolve(job.train, deterministic=True))
    assert tree_equal(run_training(_at(job, "a")), run_training(_at(job, "b")))


def test_training_leaves_global_settings_alone(job):
    before = (torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    run_training(evolve(job, train=evolve(TRAIN, deterministic=True)))
    after = (torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert not torch.are_deterministic_algorithms_enabled()
