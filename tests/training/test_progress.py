"""What a run shows: lines anywhere, a bar with the newest numbers and the time left on a terminal."""

from __future__ import annotations

import io
import re
import time

import pytest

from forge.training.progress import counting_progress, training_progress, visible

METRICS = {"loss": 2.34, "lr": 3e-4, "grad_norm": 1.2, "tok/s": 125000.0, "mfu": 0.523, "mem": "71.2/80GB"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[80, 160])
def terminal(monkeypatch, request):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(request.param))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def _train(stream) -> str:
    with training_progress(100, 10, stream) as progress:
        progress.advance(11, METRICS)
        time.sleep(0.01)
        progress.advance(12, {})
        progress.note("[step 12] held out: loss 1.0")
        time.sleep(0.01)
        progress.advance(14, {**METRICS, "loss": 2.25})
    return stream.getvalue()


def _last_frame(shown: str) -> str:
    return COLOUR.sub("", shown[shown.rindex("━ ") if "━ " in shown else 0 :])


def test_without_a_terminal_every_set_of_metrics_is_a_line_without_codes():
    assert _train(io.StringIO()).splitlines() == [
        "[step 11] loss=2.34 | lr=3.00e-04 | grad_norm=1.2 | tok/s=125k | mfu=52.3% | mem=71.2/80GB",
        "[step 12] held out: loss 1.0",
        "[step 14] loss=2.25 | lr=3.00e-04 | grad_norm=1.2 | tok/s=125k | mfu=52.3% | mem=71.2/80GB",
    ]


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = _train(terminal)
    assert shown.startswith("[step 11] loss=2.34") and "\x1b" not in shown


def test_a_terminal_shows_place_numbers_and_time_left_whatever_its_width(terminal):
    shown = _train(terminal)
    frame = _last_frame(shown)
    for part in ("14/100", "loss=2.25", "lr=3.00e-04", "tok/s=125k", "mfu=52.3%", "mem=71.2/80GB"):
        assert part in frame, part
    assert re.search(r"eta \d\d:\d\d", frame)
    assert COLOUR.search(shown)
    assert "[step 12] held out: loss 1.0" in shown


def test_no_color_is_honoured(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = _train(terminal)
    assert not COLOUR.search(shown) and "loss=2.25" in shown and "14/100" in shown


def test_a_note_keeps_its_text_to_the_letter_but_for_terminal_commands(terminal):
    line = "[bold]:smile:[/bold] " + "a word " * 40 + "--flag"
    with training_progress(10, 0, terminal) as progress:
        progress.note(line + "\x1b[31m")
    assert line + "\ufffd[31m" in terminal.getvalue()


def test_visible_text_commands_no_terminal():
    assert visible("a\tb\n\x1b[2J\x07\x7f é") == "a\tb\n\ufffd[2J\ufffd\ufffd é"


def test_counting_says_every_tenth_once():
    stream = io.StringIO()
    with counting_progress("tokenising", stream) as report:
        for done in range(1, 101):
            report(done, 100)
    lines = stream.getvalue().splitlines()
    assert lines == ["tokenising: 1 %"] + [f"tokenising: {n} %" for n in range(10, 101, 10)]


def test_counting_on_a_terminal_is_a_bar(terminal):
    with counting_progress("tokenising", terminal) as report:
        report(7, 7)
    assert "tokenising" in terminal.getvalue() and "100%" in terminal.getvalue()
