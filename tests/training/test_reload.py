"""A run read back: the state bit for bit, the loss that training reported, the text of a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.checkpoint import list_checkpoints
from forge.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    MoEConfig,
    NoSchedule,
    ScheduleFree,
    TrainConfig,
)
from forge.errors import CheckpointError, ConfigError, DataError, RunError
from forge.pytree import tree_equal
from forge.training import run_training
from forge.training.generate import Sampling
from forge.training.reload import evaluate_run, generate_from_run, load_run


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Schedule-free, sigmoid experts and recomputation: everything that must survive beside the weights."""
    folder = tmp_path_factory.mktemp("reload")
    (folder / "text").mkdir()
    for n in range(8):
        (folder / "text" / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    moe = MoEConfig(n_experts=4, router="sigmoid", expert_hidden_dim=16)
    return JobConfig(
        run_dir=str(folder / "run"),
        model=ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=257, max_seq_len=16, moe=moe),
        train=TrainConfig(
            steps=6, seq_len=16, global_batch_size=4, micro_batch_size=2, activation_checkpointing="full"
        ),
        optimizer=ScheduleFree(lr=1e-2),
        scheduler=NoSchedule(),
        data=DataConfig(path=str(folder / "text"), eval_fraction=0.2, cache_dir=str(folder / "cache")),
        eval=EvalConfig(interval=3, batches=2, batch_size=2),
        checkpoint=CheckpointConfig(interval=3),
        metrics=MetricsConfig(log_interval=1, tensorboard=False, peak_tflops=0.1),
    )


@pytest.fixture(scope="module")
def state(job):
    return run_training(job)


def test_the_state_comes_back_bit_for_bit(job, state):
    trained = load_run(job.run_dir)
    assert tree_equal(trained.state, state)
    assert set(trained.state.extras["router_bias"]) == {"0", "1"}
    assert int(load_run(job.run_dir, step=3).state.step) == 3


def test_the_parameters_to_use_are_the_average_of_schedule_free(job, state):
    trained = load_run(job.run_dir)
    assert not tree_equal(trained.params(), trained.state.params)
    assert all(torch.isfinite(p).all() for p in trained.params().values())


def test_loading_leaves_the_run_folder_alone(job, state):
    def content():
        return sorted((str(path), path.stat().st_mtime_ns) for path in Path(job.run_dir).rglob("*"))

    before = content()
    load_run(job.run_dir)
    evaluate_run(job.run_dir, batches=1)
    generate_from_run(job.run_dir, prompts=["3"], sampling=Sampling(), max_new_tokens=2)
    assert content() == before


def test_the_evaluation_is_the_one_that_training_reported(job, state):
    lines = [json.loads(line) for line in Path(job.run_dir, "metrics.jsonl").read_text().splitlines()]
    reported = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    for step in (3, 6):
        found = evaluate_run(job.run_dir, step=step, batches=2)
        assert found["step"] == step
        assert found["eval/loss"] == pytest.approx(reported[step], rel=1e-6)


def test_an_evaluation_asked_for_more_batches_than_there_are_takes_each_once(job, state):
    whole = evaluate_run(job.run_dir, batches=10**6)
    assert whole["eval/tokens"] == evaluate_run(job.run_dir, batches=10**5)["eval/tokens"]
    assert whole["eval/tokens"] > evaluate_run(job.run_dir, batches=1)["eval/tokens"]


def test_generation_repeats_for_a_seed(job, state):
    def text(seed):
        made = generate_from_run(
            job.run_dir, prompts=["3 times", "7"], sampling=Sampling(), max_new_tokens=8, seed=seed
        )
        assert made.seconds > 0 and made.samples[1].text.startswith("7")
        return made.samples[0].text

    texts = [text(seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("3 times")


def test_a_run_that_never_evaluated_can_be_evaluated(job, tmp_path):
    quiet = evolve(job, run_dir=str(tmp_path / "run"), eval=EvalConfig(interval=0), train=evolve(job.train, steps=1))
    run_training(quiet)
    assert evaluate_run(quiet.run_dir, batches=1)["eval/tokens"] > 0


def test_a_missing_checkpoint_names_those_that_are_there(job, state):
    with pytest.raises(
        CheckpointError, match="step_00000005: no such checkpoint; there are step_00000003, step_00000006"
    ):
        load_run(job.run_dir, step=5)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for run_dir in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="no checkpoint here: train first, or give another --run-dir"):
            load_run(run_dir)


def test_a_missing_device_is_refused(job, state, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="no CUDA device"):
        load_run(job.run_dir, device="cuda")


def test_a_damaged_checkpoint_is_passed_over_unless_it_was_asked_for(job, tmp_path):
    own = evolve(job, run_dir=str(tmp_path / "run"))
    run_training(own)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "params.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    assert int(load_run(own.run_dir).state.step) == 3
    with pytest.raises(CheckpointError, match=r"params\.safetensors: damaged"):
        load_run(own.run_dir, step=6)


def test_other_data_than_the_held_out_is_evaluated_by_name(job, state, tmp_path):
    """One set from two places has one loss; the same text as training has it too, whatever the run held out."""
    (tmp_path / "far.txt").write_text(" ".join(f"9 times {k} is {9 * k};" for k in range(40)))
    (tmp_path / "near.txt").write_text("0 times 0 is 0; " * 30)
    both = [str(tmp_path / "far.txt"), f"mine={tmp_path / 'near.txt'}"]
    found = evaluate_run(job.run_dir, batches=100, paths=both)
    alone = [evaluate_run(job.run_dir, batches=100, paths=[path]) for path in both]
    assert {key for key in found if key.endswith("/tokens")} == {"eval/tokens", "eval/far/tokens", "eval/mine/tokens"}
    for name, one in zip(("far", "mine"), alone, strict=True):
        assert one["eval/loss"] == one[f"eval/{name}/loss"] == found[f"eval/{name}/loss"]
    assert found["eval/far/loss"] != found["eval/mine/loss"]
    assert found["eval/tokens"] == found["eval/far/tokens"] + found["eval/mine/tokens"]


def test_two_paths_of_one_name_and_a_missing_one_are_refused(job, state, tmp_path):
    with pytest.raises(ConfigError, match="the name 'a' is given 2 times"):
        evaluate_run(job.run_dir, batches=1, paths=["x/a.txt", "y/a.txt"])
    with pytest.raises(DataError, match="nowhere"):
        evaluate_run(job.run_dir, batches=1, paths=[str(tmp_path / "nowhere")])
