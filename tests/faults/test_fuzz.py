"""At least 2,000 bad presets, flags and data files: each is one line that names the key or the file; nothing is written.

Every example is a right one with something wrong in it. What is accepted after all (a changed byte may do no harm) goes
as far as the first update, which is not made, and counts for nothing.
"""

from __future__ import annotations

import functools
import random
import shutil
import tomllib

import pytest
import tomli_w
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import forge.training
import forge.training.entry as entry
from forge.config import OPTIMIZERS, SCHEDULERS, JobConfig, flatten_config
from forge.metrics import count_parameters
from tests.cli_job import call, tree_of, write_job

SHARES = {"values": 1700, "odd": 150, "keys": 150, "combinations": 50, "tokens": 40}
SMALL = 10**6
"""Parameters of a model that an accepted config may make here."""


class _Begun(Exception):
    """Training would begin now."""


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    """A good preset, whose text is tokenised already, in a process that never trains."""
    path = write_job(tmp_path_factory.mktemp("fuzz"))
    run = entry.run_training

    def begin(*args):
        raise _Begun

    def run_small(config):
        if count_parameters(config.model).total > SMALL:
            raise _Begun
        return run(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # an accepted path may be relative
        patch.setattr(entry, "_train", begin)
        patch.setattr(forge.training, "run_training", run_small)
        assert _said("--config", path) is None
        (path.parent / "run").rename(path.parent / "accepted")
        yield path


def _said(*argv):
    """The one line of a refusal; None where the input is accepted."""
    try:
        status, out, err = call(*argv)
    except _Begun:
        return None
    assert status == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, (argv, status, out, err)
    return err


class _Count:
    """Distinct bad inputs that were refused."""

    def __init__(self, folder):
        self.refused, self.folder = set(), folder

    def check(self, key, names, *argv):
        """Refused with one of the names in the line, and nothing written; or accepted."""
        before = tree_of(self.folder)
        said = _said(*argv)
        if said is None:
            shutil.rmtree(self.folder / "run", ignore_errors=True)
            return
        assert tree_of(self.folder) == before
        assert any(name in said for name in names), f"{said!r} names none of {names}; {argv}"
        self.refused.add(key)


def _examples(share, preset, strategy, check):
    """Try examples until the share of bad ones is reached."""
    count = _Count(preset.parent)

    @settings(deadline=None, max_examples=int(SHARES[share] * 1.6), database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(example=strategy)
    def attempt(example):
        if len(count.refused) < SHARES[share]:
            check(count, example)

    attempt()
    assert len(count.refused) >= SHARES[share]
    print(f"{len(count.refused)} bad {share}")


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
    count = _Count(preset.parent)
    for key, (default, _) in KEYS.items():
        for value in WRONG[type(default)]:
            _check_value(count, preset, key, value)
    assert len(count.refused) >= SHARES["values"]


@pytest.mark.slow
def test_an_odd_value_is_refused_by_its_key(preset):
    odd = st.tuples(st.sampled_from(sorted(KEYS)), ODD)
    _examples("odd", preset, odd, lambda count, example: _check_value(count, preset, *example))


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

    _examples("keys", preset, _wrong_key(), check)


def _sections():
    """What stands before a key: where a cut takes a key away, a check of several sections may be what fails."""
    return sorted({key.partition(".")[0] + "." for key in KEYS if "." in key})


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
    _examples("combinations", preset, drawn, check)


def _spoil(content, how, chance):
    at = chance.randrange(len(content))
    if how == "bytes":
        for _ in range(6):
            at = chance.randrange(len(content) if chance.random() < 0.5 else min(200, len(content)))
            content = content[:at] + bytes([chance.randrange(128, 256)]) + content[at + 1 :]
        return content
    line = chance.choice([b"{}\n", b"[]\n", b'{"text": 5}\n', b'{"text": null}\n', b"5\n", b'{"text": "a\n', b"\xff\n"])
    noise = chance.randbytes(1 + chance.randrange(300))
    kinds = {
        "cut": content[:at],
        "noise": noise,
        "short": content[: at % 9],
        "empty": b"",
        "spoilt line": content + line,
    }
    return kinds[how]


@pytest.mark.slow
def test_a_damaged_prepared_folder_or_tokenizer_is_refused_by_its_file(preset, tmp_path):
    folder = preset.parent / "prepared"
    assert call("prepare", "--path", preset.parent / "text", "--out", folder, "--eval-fraction", "0.2")[0] == 0
    good = {path.name: path.read_bytes() for path in folder.iterdir()}

    def check(count, example):
        which, how, seed = example
        file = folder / sorted(good)[which % len(good)]
        chance = random.Random(seed)
        if how == "remove":
            file.unlink()
        else:
            file.write_bytes(_spoil(good[file.name], how, chance))
        try:
            names = [file.name, str(folder), "model.vocab_size", "train.seq_len", "data.tokenizer"]
            count.check((file.name, how, seed), names, "--config", preset, "--data.path", folder)
        finally:
            file.write_bytes(good[file.name])

    hows = st.sampled_from(["cut", "bytes", "noise", "short", "empty", "remove"])
    _examples("tokens", preset, st.tuples(st.integers(0, 9), hows, st.integers(0, 2**31)), check)
