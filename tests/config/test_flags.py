"""argv -> config: presets, flags, variants, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.config import Lion, Muon, NoSchedule, ScheduleFree
from forge.config.flags import parse_job, pop_flag
from forge.errors import ConfigError

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"


def _parse(*argv):
    return parse_job(argv, prog="cli.py train", default_preset=TINY)


def test_flags_win_over_the_preset():
    assert _parse("--model.dim", "4096", "--train.steps", "10000").model.dim == 4096
    other = _parse("--config", str(TINY.parent / "llama_8b.toml"), "--train.steps", "7")
    assert (other.model.n_layers, other.train.steps) == (32, 7)


def test_dashes_underscores_and_equals_all_work():
    assert _parse("--train.seq-len", "64") == _parse("--train.seq_len", "64") == _parse("--train.seq-len=64")
    assert _parse("--optimizer.name=lion") == _parse("--optimizer.name", "lion")


def test_choosing_an_optimizer_brings_its_own_defaults():
    assert _parse("--optimizer.name", "lion").optimizer == Lion()
    plain = parse_job(
        ["--config", str(TINY.parent / "llama_8b.toml"), "--optimizer.name", "muon", "--optimizer.lr", "0.03"],
        prog="cli.py",
        default_preset=TINY,
    )
    assert plain.optimizer == Muon(lr=0.03)


def test_schedule_free_brings_no_schedule_unless_told():
    config = _parse("--optimizer.name", "schedule_free")
    assert (type(config.optimizer), type(config.scheduler)) == (ScheduleFree, NoSchedule)
    with pytest.raises(ConfigError, match="decays"):
        _parse("--optimizer.name", "schedule_free", "--scheduler.name", "cosine")


def test_an_optional_number_can_be_turned_off():
    assert _parse("--train.grad-clip-norm", "None").train.grad_clip_norm is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.dmi", "4"], "unknown flag --model.dmi (did you mean '--model.dim'?)"),
        (["--train.steps", "1e4"], "--train.steps must be an integer, got '1e4'"),
        (["--train.steps"], "--train.steps"),
        (["stray"], "stray argument 'stray'"),
        (["--optimizer.name", "moun"], "did you mean 'muon'?"),
        (["--optimizer.name"], "--optimizer.name needs a value"),
        (["--optimizer.name", "adamw", "--optimizer.momentum", "1"], "unknown flag --optimizer.momentum"),
        (["--model.norm", "batch"], "'batch'"),
        (["--model.dim", "-4"], "model.dim must be an integer >= 1, got -4"),
        (["--config", "nope.toml"], "nope.toml: no such file"),
        (["--config", "cli.py"], "not valid TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(argv, message, monkeypatch):
    monkeypatch.chdir(TINY.parents[1])
    with pytest.raises(ConfigError) as error:
        _parse(*argv)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_last_of_a_repeated_flag_counts():
    assert pop_flag(["--a", "1", "x", "--a=2"], "--a") == ("2", ["x"])


def test_help_prints_the_fields_own_documentation(capsys):
    with pytest.raises(SystemExit) as stop:
        _parse("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "Width of the residual stream." in shown and "--train.grad-clip-norm" in shown


@pytest.mark.parametrize("value", ["two\nlines", "a\rb", "a\x1cb"])
def test_a_value_with_a_line_break_does_not_cut_the_flag_off_the_message(value):
    with pytest.raises(ConfigError, match=r"^--train\.precision must be one of .* got "):
        _parse("--train.precision", value)


def test_text_that_no_file_could_hold_is_refused():
    with pytest.raises(ConfigError, match=r"metrics\.wandb_project must be UTF-8, got 'a\\udcff'"):
        _parse("--metrics.wandb-project", "a\udcff")
