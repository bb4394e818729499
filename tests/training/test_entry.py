"""A run: trains, resumes bit for bit, says what is wrong, and leaves what it promises in its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.checkpoint import list_checkpoints
from forge.config import (
    WSD,
    AdamW,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
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
from forge.errors import CheckpointError, ConfigError, DataError, RunError, Stopped
from forge.pytree import tree_equal, tree_map
from forge.training import run_training
from forge.training.hooks import Hook

MODEL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=257, max_seq_len=16)
TRAIN = TrainConfig(steps=8, seq_len=16, global_batch_size=4, micro_batch_size=2)


@pytest.fixture
def job(tmp_path):
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
    """Sends this process a signal after a step, as an operator would."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def on_step_end(self, event):
        if event.step == self.step:
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
        "tensorboard",
    ]
    assert [p.name for p in list_checkpoints(Path(run, "checkpoints"))] == ["step_00000006", "step_00000008"]
    assert list(_steps(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(_steps(run, "eval/loss")) == [4, 8]
    assert _steps(run)[8] < _steps(run)[1]
    out = capsys.readouterr().out
    assert "bits per byte" in out and "tensorboard --logdir" in out and "generate --run-dir" in out


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
    "bf16 weights": lambda job: evolve(job, train=evolve(TRAIN, param_dtype="bf16", precision="fp32")),
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


def test_a_failed_checkpoint_is_a_warning_in_the_middle_and_an_error_at_the_end(job, monkeypatch, capsys):
    import forge.training.entry as entry

    real, failed = entry.save_checkpoint, []

    def full(root, state, **options):
        if int(state.step) == 3:
            failed.append(3)
            raise CheckpointError("no space left on device")
        return real(root, state, **options)

    monkeypatch.setattr(entry, "save_checkpoint", full)
    assert int(run_training(job).step) == 8 and failed == [3]
    assert "no space left on device; training goes on" in capsys.readouterr().err

    def always_full(root, state, **options):
        raise CheckpointError("no space left on device")

    monkeypatch.setattr(entry, "save_checkpoint", always_full)
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


def test_training_leaves_global_settings_alone(job):
    before = (torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    run_training(evolve(job, train=evolve(TRAIN, deterministic=True)))
    after = (torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT))
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert not torch.are_deterministic_algorithms_enabled()
