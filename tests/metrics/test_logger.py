"""A log line: what each kind of number looks like."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge.metrics import format_metrics, get_logger, wants_color

EXAMPLE = {"loss": 2.34, "lr": 3e-4, "grad_norm": 1.2, "tok/s": 125_000.0, "mfu": 0.523, "mem": "71.2/80GB"}


def test_the_example_of_the_specification_prints_as_there():
    line = "[step 1000] loss=2.34 | lr=3.00e-04 | grad_norm=1.2 | tok/s=125k | mfu=52.3% | mem=71.2/80GB"
    assert format_metrics(1000, EXAMPLE) == line


def test_odd_values_are_shown_and_raise_nothing():
    line = format_metrics(5, {"loss": math.nan, "x": math.inf, "y": 0.0, "n": 123456.7, "ok": True})
    assert line == "[step 5] loss=nan | x=inf | y=0 | n=123k | ok=True"
    assert format_metrics(5, {"lr": math.nan, "mfu": -math.inf}) == "[step 5] lr=nan | mfu=-inf"
    assert format_metrics(5, {}) == "[step 5] "


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1, "1"), (9999, "9999"), (9999.7, "10k"), (10_000, "10k"), (999_600, "1M"), (-123_456, "-123k"),
        (1.5e9, "1.5B"), (7e12, "7T"), (2e16, "2e+16"), (0.00001234, "1.234e-05"), (10.3712, "10.37"),
    ],
)  # fmt: skip
def test_numbers_keep_four_digits_and_large_ones_three_with_a_unit(value, shown):
    assert format_metrics(1, {"n": value}) == f"[step 1] n={shown}"


def test_a_key_is_what_its_last_part_says():
    assert format_metrics(1, {"train/lr": 1e-3, "train/mfu": 0.5}) == "[step 1] train/lr=1.00e-03 | train/mfu=50.0%"


UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@given(st.floats(-1e300, 1e300) | st.integers(-(10**18), 10**18))
@example(9999.5)
@example(999.5e3)
@example(999.5e12)
def test_a_shown_number_reads_back_within_its_digits(value):
    shown = format_metrics(1, {"n": value}).partition("n=")[2]
    number, unit = re.fullmatch(r"(.*?)([kMBT]?)", shown).groups()
    assert float(number) * UNITS[unit] == pytest.approx(value, rel=6e-3, abs=1e-320)


def test_colour_adds_escapes_and_changes_no_text():
    coloured = format_metrics(1000, EXAMPLE, color=True)
    assert coloured != format_metrics(1000, EXAMPLE)
    assert re.sub(r"\033\[\d+m", "", coloured) == format_metrics(1000, EXAMPLE)


class _Stream:
    def __init__(self, terminal: bool) -> None:
        self.isatty = lambda: terminal


def test_colour_is_for_terminals_and_honours_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(_Stream(True)) and not wants_color(_Stream(False))
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(_Stream(True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(_Stream(True))


def test_the_logger_is_the_one_of_forge():
    assert get_logger("forge.metrics.some").name == "forge.metrics.some"
