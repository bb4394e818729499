"""Errors: all of a user's mistakes are one class, with the exit status that a shell expects."""

from __future__ import annotations

import signal

import pytest

from forge import errors
from forge.errors import ForgeError, Stopped, did_you_mean

KINDS = [errors.ConfigError, errors.DataError, errors.CheckpointError, errors.RunError, errors.DonatedError]


@pytest.mark.parametrize("kind", KINDS)
def test_every_mistake_is_a_forge_error_with_status_2(kind):
    error = kind("what, where, what to do")
    assert isinstance(error, ForgeError) and error.exit_status == 2 and str(error) == "what, where, what to do"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_gives_the_status_that_a_shell_gives(number, status):
    error = Stopped(number, "saved step 3")
    assert error.exit_status == status
    assert str(error) == f"stopped by {number.name}: saved step 3"
    assert ForgeError.exit_status == 2


def test_the_nearest_word_is_suggested_and_a_distant_one_is_not():
    assert did_you_mean("dmi", ["dim", "depth"]) == " (did you mean 'dim'?)"
    assert did_you_mean("zzz", ["dim", "depth"]) == ""
    assert did_you_mean("dim", iter(())) == ""
