"""Loggers stay below `forge`, speak on stderr, and on rank 0 only."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from forge.logging import get_logger, process_rank


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "2"}, 2),
        ({"RANK": "1", "SLURM_PROCID": "2"}, 1),
        ({"RANK": "x"}, 0),
    ],
)
def test_the_rank_is_the_launchers(monkeypatch, environment, rank):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process_rank() == rank


def test_a_message_goes_to_stderr_once_with_level_and_name(capsys):
    for _ in range(3):
        log = get_logger("forge.some.module")
    log.info("hello")
    out, err = capsys.readouterr()
    assert out == "" and err.count("hello") == 1
    assert err.endswith(" I forge.some.module: hello\n")


def test_other_ranks_are_silent_unless_asked_for(monkeypatch, capsys):
    quiet, loud = get_logger("forge.test_quiet"), get_logger("forge.test_loud", rank_zero_only=False)
    monkeypatch.setenv("RANK", "1")
    quiet.warning("quiet")
    loud.warning("loud")
    err = capsys.readouterr().err
    assert "quiet" not in err.replace("test_quiet", "") and "loud\n" in err


def test_names_outside_forge_are_placed_below_it():
    assert get_logger("__main__").name == "forge.__main__"
    assert get_logger("forgery").name == "forge.forgery"
    assert get_logger("forge.data").name == "forge.data"


def test_the_root_logger_is_left_alone():
    before = (list(logging.getLogger().handlers), logging.getLogger().level)
    get_logger("forge.anything").warning("x")
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before
    assert not logging.getLogger("forge").propagate


QUIET = """
import logging, os, sys
before = dict(os.environ)
import forge
assert not logging.getLogger().handlers and not logging.getLogger('forge').handlers
assert 'torch' not in sys.modules and dict(os.environ) == before
"""


def test_importing_forge_sets_up_nothing():
    subprocess.run([sys.executable, "-c", QUIET], check=True)
