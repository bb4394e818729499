"""Bad presets and flags, each one line that names the key or the file; see `fuzzing` for what is held of all."""

from __future__ import annotations

import functools
import tomllib

import pytest
import tomli_w
from hypothesis import strategies as st

from forge.config import OPTIMIZERS, SCHEDULERS, JobConfig, flatten_config
from tests.faults.fuzzing import SHARES, Count, try_examples, untrained


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    with untrained(tmp_path_factory.mktemp("fuzz")) as preset:
        yield preset


def test_the_shares_are_two_thousand():
    assert sum(SHARES.values()) >= 2000


def _keys():
    """Every key -> (its default, the sections that make it exist)."""
    found = {}
    for name, kind in OPTIMIZERS.items():
        config = JobConfig(optimizer=kind(), scheduler=SCHEDULERS["none"]())
        for key, value in flatten_config(config).items():
            found.setdefault(key, (value, {"optimizer": {"name": name}, "scheduler": {"name": "none"}}))
    for name, kind in SCHEDULERS.items():
        for key, value in flatten_config(JobConfig(scheduler=kind())).items():
            found.setdefault(key, (value, {"scheduler": {"name": name}}))
    return found


KEYS = _keys()
WRONG = {
    bool: ["false", "", [True], {"x": 1}, 0, 1, "true", 1.5, [], {}, -1, "none", float("nan")],
    int: [
        -2,
        -(2**63),
        "1e4",
        [[]],
        "x",
        "",
        True,
        1.5,
        [],
        {},
        -7,
        -(10**30),
        float("nan"),
        float("inf"),
        [1],
        "4",
        -1.5,
        False,
    ],
    float: [
        "nan",
        [[]],
        {"x": 1},
        "1e-3",
        "x",
        "",
        True,
        [],
        {},
        float("nan"),
        float("inf"),
        float("-inf"),
        -(10**40),
        [0.5],
        "0.1",
        False,
    ],
    str: [[""], {"x": 1}, -1, False, 5, True, [], {}, "", 1.5, ["x"], float("nan")],
    list: [5, "x", True, [5], ["x"], [{"x": 1}], {"x": 1}, [[]], [{}]],
    dict: [5, "x", True, [5], {"": {}}, {"x": "y"}],
}
ODD = st.one_of(
    st.integers(-(10**20), -2), st.floats(allow_nan=True), st.text(max_size=5), st.dates(), st.times(), st.datetimes(),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def _nested(key, value, base):
    values = {section: dict(table) for section, table in base.items()}
    table = values
    *sections, name = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
    table[name] = value
    return values


@functools.cache
def _values(preset):
    return tomllib.loads(preset.read_text(encoding="utf-8"))


def _write(preset, values):
    """The preset with these values over its own; a section with a name of its own is as it is given."""
    merged = dict(_values(preset))
    for section, table in values.items():
        both = isinstance(table, dict) and isinstance(merged[section], dict) if section in merged else False
        merged[section] = {**merged[section], **table} if both and "name" not in table else table
    changed = preset.with_name("changed.toml")
    changed.write_text(tomli_w.dumps(merged), encoding="utf-8")
    return changed


def _check_value(count, preset, key, value):
    values = _nested(key, value, KEYS[key][1]) if "." in key else {key: value}
    names = [key, key.rpartition(".")[0] + "[", f"/{value}:"]
    count.check((key, repr(value)), names, "--config", _write(preset, values))


@pytest.mark.slow
def test_a_value_of_another_type_or_out_of_range_is_refused_by_its_key(preset):
    count, tried = Count(preset.parent), set()
    for key, (default, _) in KEYS.items():
        for value in WRONG[type(default)]:
            tried.add((key, repr(value)))
            _check_value(count, preset, key, value)
    assert len(count.refused) >= SHARES["values"]
    assert {value for _, value in tried - count.refused} <= {"5", "1.5"}, "right for a number that may be none"


@pytest.mark.slow
def test_an_odd_value_is_refused_by_its_key(preset):
    odd = st.tuples(st.sampled_from(sorted(KEYS)), ODD)
    try_examples("odd", preset, odd, lambda count, example: _check_value(count, preset, *example))


@st.composite
def _wrong_key(draw):
    key = draw(st.sampled_from(sorted(KEYS)))
    *sections, name = key.split(".")
    at, letter = draw(st.integers(0, len(name))), draw(st.sampled_from("xq_9") | st.characters(codec="utf-8"))
    changed = name[:at] + letter + name[at + draw(st.integers(0, 1)) :]
    return ".".join([*sections, changed]) if "." not in changed and changed else "", KEYS[key]


@pytest.mark.slow
def test_a_key_that_does_not_exist_is_named(preset):
    def check(count, example):
        key, (value, base) = example
        if not key or key in KEYS or not all(ord(letter) > 32 for letter in key):
            return
        argv = "--config", _write(preset, _nested(key, value, base) if "." in key else {key: value})
        count.check(key, [f"unknown key {key}"], *argv)

    try_examples("keys", preset, _wrong_key(), check)


@st.composite
def _damaged_text(draw):
    """What to do to the bytes of a preset."""
    how = draw(st.sampled_from(["cut", "byte", "line twice", "noise", "utf-16", "latin", "swap", "table twice"]))
    return how, draw(st.integers(0, 10**6)), draw(st.binary(min_size=1, max_size=6)), draw(st.integers(0, 10**6))


def _damage(good, example):
    how, at, noise, other = example
    at %= len(good)
    lines = good.splitlines(keepends=True)
    line = lines[other % len(lines)]
    return {
        "cut": good[:at],
        "byte": good[:at] + noise + good[at + 1 :],
        "line twice": good + line,
        "table twice": good + b"[model]\n" + line,
        "noise": noise * (1 + other % 50),
        "utf-16": good[:at].decode(errors="ignore").encode("utf-16"),
        "latin": good[:at] + "é".encode("latin-1") + good[at:],
        "swap": good[:at].replace(b"]", b"[") + good[at:],
    }[how]


@pytest.mark.slow
def test_a_file_that_is_no_preset_is_named(preset):
    good = preset.read_bytes()

    def check(count, example):
        file = preset.with_name("damaged.toml")
        file.write_bytes(_damage(good, example))
        count.check(file.read_bytes(), ["damaged.toml", *_sections()], "--config", file)

    try_examples("texts", preset, _damaged_text(), check)


def _sections():
    """What stands before a key: where a cut takes a key away, a check of several sections may be what fails."""
    return sorted({key.partition(".")[0] + "." for key in KEYS if "." in key})


WORDS = ["", "x", "1e4", "nan", "inf", "-inf", "None", "True", "é", "a b", "--", "[1]", "\x1b[31m", "0x10", "1_0", "-1",
         "-0.5", "9" * 30, "1.5", "two\nlines", "/", "\0", "{}", "--model.dim", "\udcff"]  # fmt: skip


@st.composite
def _wrong_flag(draw):
    key = draw(st.sampled_from([key for key in sorted(KEYS) if not isinstance(KEYS[key][0], (list, dict))]))
    flag = "--" + draw(st.sampled_from([key, key.replace("_", "-")]))
    form = draw(st.sampled_from(["right"] * 6 + ["joined", "misspelt", "alone"]))
    at = draw(st.integers(3, len(flag)))
    flag = flag[:at] + "x" + flag[at:] if form == "misspelt" else flag
    value = draw(st.sampled_from(WORDS) | st.text(max_size=5))
    words = [f"{flag}={value}"] if form == "joined" else [flag] if form == "alone" else [flag, value]
    return key, flag, value, words, KEYS[key][1]


@pytest.mark.slow
def test_a_wrong_flag_is_named(preset):
    def check(count, example):
        key, flag, value, words, base = example
        names = [key, flag, flag.replace("_", "-"), key.replace("_", "-"), repr(value), f"unknown flag {value}"]
        count.check(
            tuple(words),
            [*names, key.partition(".")[0] + ".", "distributed:"],
            "--config",
            _write(preset, base),
            *words,
        )

    try_examples("flags", preset, _wrong_flag(), check)


COMBINATIONS = {
    "model.dim": st.integers(1, 63),
    "model.n_heads": st.integers(1, 9),
    "model.n_kv_heads": st.integers(1, 9),
    "model.max_seq_len": st.integers(1, 20),
    "train.seq_len": st.integers(1, 40),
    "train.global_batch_size": st.integers(1, 9),
    "train.micro_batch_size": st.integers(1, 9),
    "train.max_rollbacks": st.integers(0, 2),
    "checkpoint.interval": st.integers(0, 2),
    "distributed.tp": st.integers(1, 3),
    "distributed.pp": st.integers(1, 3),
    "distributed.cp": st.integers(1, 3),
    "scheduler.warmup_steps": st.integers(0, 9),
    "train.device": st.sampled_from(["cpu", "cuda"]),
    "model.vocab_size": st.integers(1, 260),
}


@pytest.mark.slow
def test_a_combination_that_cannot_be_is_refused_by_one_of_its_keys(preset):
    def check(count, example):
        flags = [word for key, value in example.items() for word in (f"--{key}", str(value))]
        count.check(tuple(flags), [*example, *_sections(), "distributed:", "CUDA"], "--config", preset, *flags)

    some = st.sets(st.sampled_from(sorted(COMBINATIONS)), min_size=2, max_size=5)
    drawn = some.flatmap(lambda keys: st.fixed_dictionaries({key: COMBINATIONS[key] for key in sorted(keys)}))
    try_examples("combinations", preset, drawn, check)
