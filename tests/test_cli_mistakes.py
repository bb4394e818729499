"""Each mistake on the command line is one line that names the thing and the remedy, and nothing is half-written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import cli
from forge.config import JobConfig, config_to_dict, flatten_config, load_config
from tests.cli_job import call, refused, tree_of, write_job


@pytest.fixture
def preset(tmp_path):
    return write_job(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The preset of a run with checkpoints at steps 2 and 4; tests do not write to it."""
    preset = write_job(tmp_path_factory.mktemp("trained"))
    assert call("--config", preset)[0] == 0
    return preset


FLAGS = [
    (["--model.dmi", "4"], "unknown flag --model.dmi (did you mean '--model.dim'?)"),
    (["--train.steps", "1e4"], "--train.steps must be an integer, got '1e4'"),
    (["--train.steps", "many"], "--train.steps must be an integer, got 'many'"),
    (["--train.steps"], "--train.steps needs a value"),
    (["--optimizer.lr", "high"], "--optimizer.lr must be a number, got 'high'"),
    (["--model.n-kv-heads", "1.5"], "--model.n-kv-heads must be an integer or None, got '1.5'"),
    (["--train.grad-clip-norm", "off"], "--train.grad-clip-norm must be a number or None, got 'off'"),
    (["--optimizer.lr", "nan"], "optimizer.lr must be a number >= 0, got nan"),
    (["--train.precision", "fp8"], "--train.precision must be one of 'auto', 'fp32', 'bf16', got 'fp8'"),
    (["--metrics.jsonl", "false"], "a switch takes no value"),
    (["--train.freeze", "norms"], "train.freeze is a table"),
    (["--model.dim", "17"], "model.dim = 17 is not divisible by 2 heads"),
    (["--model.n-kv-heads", "3"], "model.n_heads = 2 is not divisible by model.n_kv_heads = 3"),
    (["--scheduler.warmup-steps", "4"], "scheduler.warmup_steps = 4 must be less than train.steps = 4"),
    (["--train.seq-len", "32"], "train.seq_len = 32 exceeds model.max_seq_len = 16"),
    (["--train.micro-batch-size", "3"], "train.global_batch_size = 4 is not divisible by train.micro_batch_size = 3"),
    (["--train.max-rollbacks", "1", "--checkpoint.interval", "0"], "train.max_rollbacks = 1 needs checkpoints"),
    (["stray"], "stray argument 'stray'"),
    (["--data.path", "/no/such/data"], "/no/such/data: no such file"),
    (["--model.vocab-size", "200"], "a vocabulary of 257 does not fit model.vocab_size = 200"),
    (["--data.raw-dtype", "int8"], "'int8'"),
    (["--data.path", "hf:/no/such/set"], "hf:/no/such/set: cannot be loaded ("),
    (["--data.tokenizer", "/no/tokenizer.json"], "/no/tokenizer.json: no such file"),
    (["--config", "/no/preset.toml"], "/no/preset.toml: no such file; presets are in configs/"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(flags) for flags, _ in FLAGS])
def test_a_wrong_flag_is_one_line_and_nothing_is_written(preset, flags, message):
    before = tree_of(preset.parent)
    assert message in refused("--config", preset, *flags)
    assert tree_of(preset.parent) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("empty.txt", b"", "empty"), ("short.txt", b"hi", "train.seq_len = 16 needs 17"), ("raw.txt", b"\xff\xfe" * 99, "not UTF-8"),
     ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "a.jsonl: line 2: no key 'text' (it has: body)"),
     ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: damaged or cut short after line 0"),
     ("a.parquet", b"no parquet", "a.parquet: not a Parquet file, or damaged"),
     ("a.bin", b"abc", "a.bin: 3 bytes are no whole number of uint16 tokens"),
     ("a.npy", b"no numpy", "a.npy: not a .npy file")],
)  # fmt: skip
def test_unusable_data_is_one_line_and_leaves_no_run(preset, name, content, message):
    (preset.parent / name).write_bytes(content)
    before = tree_of(preset.parent)
    assert message in refused("--config", preset, "--data.path", preset.parent / name)
    assert tree_of(preset.parent) == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.dmi", 4, "unknown key model.dmi (did you mean 'dim'?)"),
        ("modle", {}, "unknown key modle (did you mean 'model'?)"),
        ("train.steps", "ten", "train.steps must be an integer, got 'ten'"),
        ("optimizer.name", "moun", "did you mean 'muon'?"),
    ],
)
def test_a_wrong_key_in_a_preset_names_the_file_and_the_nearest_key(preset, key, value, message):
    values = config_to_dict(load_config(preset))
    section, _, name = key.rpartition(".")
    (values[section] if section else values)[name] = value
    preset.write_text(tomli_w.dumps(values))
    before = tree_of(preset.parent)
    said = refused("--config", preset)
    assert message in said and str(preset) in said
    assert tree_of(preset.parent) == before


def test_a_run_folder_below_a_file_is_refused(preset):
    (preset.parent / "file").write_text("x")
    before = tree_of(preset.parent)
    assert "cannot be written (Not a directory)" in refused(
        "--config", preset, "--run-dir", preset.parent / "file" / "run"
    )
    assert tree_of(preset.parent) == before


def test_a_contradicting_config_on_resume_names_key_and_values(trained):
    before = tree_of(trained.parent)
    assert "optimizer.lr = 0.01 there, 0.5 asked" in refused("--config", trained, "--optimizer.lr", "0.5")
    assert tree_of(trained.parent) == before


def test_an_unknown_command_suggests_the_nearest():
    assert "unknown command 'trian' (did you mean 'train'?)" in refused("trian")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["generate", "--top-p", "2"], "top_p must be a number from 0 to 1, got 2.0"),
        (["generate", "--top-p", "nan"], "top_p must be a number from 0 to 1, got nan"),
        (["generate", "--min-p", "2"], "min_p must be a number from 0 to 1, got 2.0"),
        (["generate", "--stop", ""], "a stop string is empty"),
        (["generate", "--prompt-file", "/no/such/file"], "--prompt-file /no/such/file: not a readable UTF-8 text"),
        (["generate", "--distributed.tp", "0"], "distributed.tp must be an integer >= 1, got 0"),
        (["generate", "--top-k", "0"], "top_k must be an integer >= 1, got 0"),
        (["generate", "--temperature", "-1"], "temperature must be a number >= 0, got -1.0"),
        (["generate", "--max-new-tokens", "-1"], "max_new_tokens must be an integer >= 0, got -1"),
        (["generate", "--seed", "99999999999999999999"], "seed must be an integer from 0"),
        (["generate", "--promt", "x"], "unknown flag --promt (did you mean '--prompt'?)"),
        (["eval", "--step", "3"], "step_00000003: no such checkpoint; there are step_00000002, step_00000004"),
        (["eval", "--step", "-5"], "step must be an integer >= -1, got -5"),
        (["eval", "--batches", "0"], "batches must be an integer >= 1, got 0"),
        (["eval", "--device", "tpu"], "'tpu'"),
        (
            ["replay", "--step", "9"],
            "step 9 was neither logged nor saved: nothing to compare; the nearest step that was is 4",
        ),
    ],
)
def test_a_mistake_about_a_trained_run_is_one_line(trained, argv, message):
    assert message in refused(*argv, "--run-dir", trained.parent / "run")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "diff compares two checkpoints: cli.py diff"),
        (["/nowhere/a"], "diff compares two checkpoints"),
        (["/nowhere/a", "/nowhere/b"], "/nowhere/a: no checkpoint here"),
        (["/nowhere/a", "/nowhere/b", "c"], "stray argument 'c'"),
        (["/nowhere/a", "/nowhere/b", "--step", "3"], "unknown flag --step"),
    ],
)
def test_a_mistake_about_two_checkpoints_is_one_line(argv, message):
    assert message in refused("diff", *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "report shows one run or several: cli.py report"),
        (["/nowhere"], "/nowhere: no metrics.jsonl here"),
        (["/nowhere", "--ot", "x"], "unknown flag --ot (did you mean '--out'?)"),
    ],
)
def test_a_mistake_about_a_report_is_one_line(argv, message):
    assert message in refused("report", *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be an integer >= 1, got '0'"),
        (["--steps", "1e3"], "--steps must be an integer >= 1, got '1e3'"),
        (["--trace", "/nowhere"], "/nowhere: cannot be read: No such file"),
        (["--model.dmi", "4"], "unknown flag --model.dmi"),
    ],
)
def test_a_mistake_about_a_profile_is_one_line(preset, argv, message):
    assert message in refused("profile", "--config", preset, *argv)
    assert not (preset.parent / "run").exists()


def test_a_profile_that_cannot_be_written_is_one_line(preset):
    (preset.parent / "run").touch()
    assert "steps_4_4.json: cannot be read: Not a directory" in refused("profile", "--config", preset, "--steps", 1)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_run_folder_without_checkpoint_is_refused(tmp_path, command):
    assert "no checkpoint here: train first" in refused(command, "--run-dir", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--path", "/no/such/text"], "/no/such/text: no such file"),
        (["--eval-fraction", "2"], "eval_fraction must be a number from 0 to 0.5, got 2.0"),
        (["--tokenizer", "/no/tokenizer.json"], "/no/tokenizer.json: no such file"),
        (["--shard-tokens", "0"], "shard_tokens must be an integer >= 1, got 0"),
        (["--workers", "-1"], "workers must be an integer >= 0, got -1"),
        (["--raw-dtype", "float32"], "'float32'"),
        (["--verify", "/no/such/folder"], "/no/such/folder: not a prepared folder"),
    ],
)
def test_a_mistake_in_prepare_is_one_line_and_makes_no_folder(preset, argv, message):
    out = preset.parent / "prepared"
    text = [] if "--path" in argv else ["--path", preset.parent / "text"]
    assert message in refused("prepare", *text, "--out", out, *argv)
    assert not out.exists()


def test_a_second_path_to_prepare_is_not_taken_in_the_place_of_the_first(preset):
    text, out = preset.parent / "text", preset.parent / "prepared"
    assert "--path is given more than once" in refused("prepare", "--path", text, f"--path={text}", "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "fast", ""])
def test_an_impossible_rate_is_refused(preset, rate):
    assert "--tflops" in refused("plan", "--config", preset, "--tflops", rate)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus must be a number of GPUs from 1 to 1000000, got '0'"),
        (["--gpus", "many"], "--gpus must be a number"),
        (["--gpus"], "--gpus needs a value"),
        (["--gpus", "6", "--distributed.tp", "4"], "does not divide the 6 processes"),
        (["--gpus", "3"], "global_batch_size = 4 is not divisible by train.micro_batch_size = 2 x 3"),
        (
            ["--distributed.tp", "2", "--train.seq-len", "15"],
            "train.seq_len = 15 is not divisible by distributed.tp = 2",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_plan(preset, flags, message):
    assert message in refused("plan", "--config", preset, "--tflops", 1, *flags)


@pytest.mark.parametrize("damage", ["cut", "changed", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_named_when_all_are(trained, tmp_path, damage):
    shutil.copytree(trained.parent / "run", tmp_path / "run")
    newest, older = tmp_path / "run/checkpoints/step_00000004", tmp_path / "run/checkpoints/step_00000002"
    _damage(newest, damage)
    assert "damaged" in refused("eval", "--run-dir", tmp_path / "run", "--step", 4)
    status, out, err = call("eval", "--run-dir", tmp_path / "run")
    assert status == 0 and "step 2: loss" in out and "damaged" in err
    _damage(older, damage)
    assert "every checkpoint is damaged" in refused("eval", "--run-dir", tmp_path / "run")


def _damage(checkpoint: Path, how: str) -> None:
    file = checkpoint / ("manifest.json" if how == "manifest" else "params.safetensors")
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] if how != "changed" else content[:middle] + b"\x55" + content[middle + 1 :])


TEXTS = ["", "x", "1.5", "1e4", "nan", "None", "True", "é", "a b", "two\nlines", "--", "--model.dim", "[1]", "gelu", "muon",
         "wsd", "cosine", "schedule_free", "\x1b[31m"]  # fmt: skip
NUMBERS = ["-1", "0", "1", "2", "3", "4", "6", "16", "9" * 20]
FRACTIONS = ["-0.5", "0", "0.1", "0.5", "1", "1e-3", "1e300", "nan", "inf"]
DEFAULTS = flatten_config(JobConfig())
KEYS = sorted({*DEFAULTS, "optimizer.momentum", "scheduler.stable_steps", "tflops"})


def _fitting(key: str) -> list[str]:
    """Values of about the right type, so that ranges and combinations are reached too."""
    value = DEFAULTS.get(key, "none")
    if isinstance(value, float):
        return FRACTIONS
    return NUMBERS if isinstance(value, int) or value == "none" else TEXTS


def _plan_is_silent_or_one_line(*argv):
    """Anything but success and a mistake's one line is a bug."""
    status, out, err = call("plan", "--tflops", 1, *argv)
    if status == 0:
        assert out and err == ""
    else:
        assert status == 2
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1 and len(err) > 12


@st.composite
def _flags(draw):
    """Up to three flags, right or misspelt, with and without a value, joined or apart."""
    words = []
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(KEYS))
        fitting, at = _fitting(key), draw(st.integers(0, len(key)))
        key = draw(st.sampled_from([key] * 20 + [key[:at] + "x" + key[at:], key[:at] + key[at + 1 :], ""]))
        value = draw(st.sampled_from(fitting * 6 + TEXTS) if draw(st.integers(0, 7)) else st.text(max_size=6))
        flag = "--" + draw(st.sampled_from([key, key.replace("_", "-")]))
        words += draw(
            st.sampled_from([[flag, value]] * 20 + [[f"{flag}={value}"], [flag], [value], [flag, value, value]])
        )
    return words


@pytest.fixture(scope="module")
def tiny_preset(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("plan"))


@pytest.mark.slow
@settings(deadline=None, max_examples=90)
@given(words=_flags())
def test_no_flag_or_value_gives_a_traceback(tiny_preset, words):
    _plan_is_silent_or_one_line("--config", tiny_preset, *words)


TOML_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-2, 3), st.just(10**18), st.floats(), st.text(max_size=4), st.sampled_from(TEXTS),
              st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=3,
)  # fmt: skip


@settings(deadline=None, max_examples=120)
@given(
    changes=st.dictionaries(
        st.sampled_from([*KEYS, "model", "train", "optimizer", "x", "model.x\ny"]), TOML_VALUES, min_size=1, max_size=3
    )
)
def test_no_preset_gives_a_traceback(tiny_preset, changes):
    values = config_to_dict(load_config(tiny_preset))
    for key, value in changes.items():
        *sections, name = key.split(".")
        table = values
        for section in sections:
            table = table[section] if isinstance(table.get(section), dict) else table.setdefault(f"{section}2", {})
        table[name] = value
    preset = tiny_preset.with_name("changed.toml")
    preset.write_text(tomli_w.dumps(values), encoding="utf-8")
    _plan_is_silent_or_one_line("--config", preset)


@settings(deadline=None, max_examples=15)
@given(content=st.binary(max_size=40))
def test_no_file_offered_as_a_preset_gives_a_traceback(tiny_preset, content):
    preset = tiny_preset.with_name("noise.toml")
    preset.write_bytes(content)
    _plan_is_silent_or_one_line("--config", preset)


def test_a_rank_names_itself_in_its_errors(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["--train.stpes", "4"]) == 2
    assert capsys.readouterr().err.startswith("error (rank 3): unknown flag --train.stpes")
