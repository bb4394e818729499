"""A model of Hugging Face's is trained on by the command line, and what was trained goes out again."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from forge.checkpoint import list_checkpoints
from forge.config import load_config
from forge.pytree import tree_equal
from forge.training import run_training
from forge.training.reload import load_run
from tests.checkpoint.huggingface.peers import peer_logits, run_logits, saved_peer
from tests.cli_job import call, refused, tree_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, text that its tokenizer knows, and a run made of both; tests do not write to the first two."""
    root = tmp_path_factory.mktemp("exchange")
    saved_peer("qwen2_moe", root / "hf")
    (root / "text").mkdir()
    for n in range(8):
        (root / "text" / f"{n}.txt").write_text("abcdefgh" * (20 + n))
    assert call("import", "--path", root / "hf", "--run-dir", root / "run")[0] == 0
    return root


def _flags(root, *more):
    return [
        "train", "--config", root / "run/config.toml", "--data.path", root / "text", "--data.cache-dir", root / "cache",
        "--train.steps", 6, "--train.global-batch-size", 4, "--train.micro-batch-size", 2, "--train.seq-len", 16,
        "--train.device", "cpu", "--metrics.log-interval", 1, "--metrics.no-tensorboard", "--metrics.peak-tflops", 0.1,
        "--data.eval-fraction", 0.2, *more,
    ]  # fmt: skip


def test_training_goes_on_from_an_imported_model_and_the_result_goes_out(folders, tmp_path):
    run = tmp_path / "run"
    status, out, err = call("import", "--path", folders / "hf", "--run-dir", run)
    assert status == 0 and f"--config {run}/config.toml" in out and "tokenizer.json was not there" not in out, err
    theirs = peer_logits(transformers.AutoModelForCausalLM.from_pretrained(folders / "hf").eval())
    torch.testing.assert_close(run_logits(run), theirs, rtol=1e-4, atol=1e-4)
    start = load_file(folders / "hf/model.safetensors")
    status, out, err = call(*_flags(tmp_path, "--data.path", folders / "text", "--optimizer.lr", 1e-2))
    assert status == 0, err
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in losses if "train/loss" in line]
    assert len(losses) == 6 and losses[-1] < 0.95 * losses[0]
    status, out, err = call("export", "--run-dir", run, "--out", tmp_path / "out", "--shard-size", "8KB")
    assert status == 0 and "as qwen2_moe" in out, err
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(peer_logits(trained), run_logits(run), rtol=1e-4, atol=1e-4)
    assert not torch.equal(trained.state_dict()["lm_head.weight"], start["lm_head.weight"])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("ba").input_ids == [1, 0]


def test_a_run_from_an_imported_model_is_stopped_and_resumed_like_any_other(folders, tmp_path):
    curves = []
    for name, stops in (("whole", [6]), ("halves", [3, 6])):
        run = tmp_path / name / "run"
        assert call("import", "--path", folders / "hf", "--run-dir", run)[0] == 0
        for steps in stops:
            flags = ["--data.path", folders / "text", "--train.steps", steps, "--scheduler.name", "constant"]
            assert call(*_flags(tmp_path / name, *flags, "--scheduler.warmup-steps", 1))[0] == 0
        curves.append(load_file(list_checkpoints(run / "checkpoints")[-1] / "params.safetensors"))
    assert all(torch.equal(curves[0][name], curves[1][name]) for name in curves[0])


def test_an_imported_model_can_generate_before_it_is_trained(folders):
    status, out, err = call("generate", "--run-dir", folders / "run", "--prompt", "abc", "--max-new-tokens", 5)
    assert status == 0 and out.split()[:3] == ["a", "b", "c"], err


def test_all_but_the_model_is_free_and_another_model_is_refused(folders):
    said = refused(*_flags(folders, "--model.n-layers", 3))
    assert "contradicts the config: model.n_layers = 2 there, 3 asked" in said
    config = load_config(folders / "run/config.toml")
    assert config.optimizer.name == "adamw" and said.count("there,") == 1


def test_schedule_free_and_bf16_start_from_the_imported_weights(folders, tmp_path):
    from attrs import evolve

    from forge.config import NoSchedule, ScheduleFree

    assert call("import", "--path", folders / "hf", "--run-dir", tmp_path / "run", "--dtype", "bf16")[0] == 0
    config = load_config(tmp_path / "run/config.toml")
    assert config.train.param_dtype == "bf16"
    train = evolve(config.train, steps=1, seq_len=16, global_batch_size=2, micro_batch_size=2, device="cpu")
    metrics = evolve(config.metrics, tensorboard=False, peak_tflops=0.1)
    data = evolve(config.data, path=str(folders / "text"), cache_dir=str(tmp_path / "cache"))
    state = run_training(
        evolve(
            config, train=train, data=data, metrics=metrics, optimizer=ScheduleFree(lr=1e-30), scheduler=NoSchedule()
        )
    )
    start = load_file(tmp_path / "run/checkpoints/step_00000000/params.00000.safetensors")
    assert all(torch.equal(state.params[name], start[name]) for name in start)


MISTAKES = [
    (["import"], "--path is missing"),
    (["import", "--path", "{hf}"], "--run-dir is missing"),
    (["import", "--path", "/no/model", "--run-dir", "{new}"], "/no/model/config.json: no such file"),
    (["import", "--path", "{hf}", "--run-dir", "{run}"], "holds a run already: choose another --run-dir"),
    (["import", "--path", "{hf}", "--run-dir", "{new}", "--dtype", "fp8"], "'fp8'"),
    (
        ["import", "--pth", "{hf}", "--path", "{hf}", "--run-dir", "{new}"],
        "unknown flag --pth (did you mean '--path'?)",
    ),
    (["export", "--run-dir", "{run}"], "--out is missing"),
    (["export", "--run-dir", "{new}", "--out", "{out}"], "no checkpoint here: train first"),
    (["export", "--run-dir", "{run}", "--out", "{hf}"], "exists already: choose another --out"),
    (
        ["export", "--run-dir", "{run}", "--out", "{out}", "--shard-size", "big"],
        "shard_size must be a size such as 5GB",
    ),
    (["export", "--run-dir", "{run}", "--out", "{out}", "--step", "3"], "step_00000003: no such checkpoint"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_nothing_is_written(folders, argv, message):
    places = {name: str(folders / name) for name in ("hf", "run", "new", "out")}
    before = tree_of(folders)
    assert message in refused(*(word.format(**places) for word in argv))
    assert tree_of(folders) == before


def test_a_model_without_a_tokenizer_says_where_to_put_one(folders, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(folders / "hf").save_pretrained(tmp_path / "hf")
    status, out, _ = call("import", "--path", tmp_path / "hf", "--run-dir", tmp_path / "run")
    assert status == 0 and f"its tokenizer.json was not there: put it at {tmp_path}/run/tokenizer/tokenizer.json" in out
    assert "tokenizer.json: no such file" in refused("generate", "--run-dir", tmp_path / "run")


def test_a_run_starts_from_what_another_run_would_export(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert call(*_flags(folders, "--run-dir", first, "--train.ema-decay", 0.9))[0] == 0
    status, out, err = call("import", "--path", first, "--run-dir", second, "--step", 6)
    assert status == 0 and f"--config {second}/config.toml" in out, err
    before, after = load_run(first, device="cpu"), load_run(second, device="cpu")
    assert tree_equal(after.state.params, before.params()) and not tree_equal(before.params(), before.state.params)
    assert int(after.state.step) == 0 and not after.state.extras["ema"]["weight"]
    assert load_config(second / "config.toml") == evolve(load_config(first / "config.toml"), run_dir=str(second))
    assert call(*_flags(folders, "--config", second / "config.toml", "--optimizer.lr", 1e-5))[0] == 0
    assert int(load_run(second, device="cpu").state.step) == 6


def test_the_balance_that_sigmoid_routers_learned_goes_over_to_a_run_that_starts_from_them(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("what is said once is said again. " * 60)
    experts = ["--model.moe.n-experts", 4, "--model.moe.router", "sigmoid", "--model.moe.expert-hidden-dim", 16]
    shape = ["--model.dim", 16, "--model.n-layers", 2, "--model.n-heads", 2, "--model.vocab-size", 257, *experts]
    first, second = tmp_path / "first", tmp_path / "second"
    argv = _flags(tmp_path, "--run-dir", first, *shape)
    assert call("train", *argv[3:])[0] == 0
    assert call("import", "--path", first, "--run-dir", second, "--dtype", "bf16")[0] == 0
    learned, start = (load_run(run, device="cpu").state.extras["router_bias"] for run in (first, second))
    assert set(learned) == {"0", "1"} and all(bias.any() for bias in learned.values())
    assert tree_equal(start, learned)
    argv = _flags(tmp_path, "--config", second / "config.toml", "--train.steps", 1)
    assert call(*argv)[0] == 0
    moved = load_run(second, device="cpu").state.extras["router_bias"]
    assert all((moved[layer] - learned[layer]).abs().max() < 1.5e-3 for layer in learned)  # by one bias_update_rate


def test_a_run_is_not_imported_over_another_and_a_step_must_be_there(folders, tmp_path):
    assert call(*_flags(folders, "--run-dir", tmp_path / "run"))[0] == 0
    before = tree_of(tmp_path / "run")
    assert "holds a run already" in refused("import", "--path", folders / "run", "--run-dir", tmp_path / "run")
    missing = refused("import", "--path", tmp_path / "run", "--run-dir", tmp_path / "new", "--step", 99)
    assert "no such checkpoint" in missing
    assert tree_of(tmp_path / "run") == before and not (tmp_path / "new").exists()
