"""What can go wrong because of what a user asked for, as one line each.

The command line prints the message of a `ForgeError` and exits with its `exit_status`: 2 for a mistake, 1 where another
rank failed, 128 + n for signal n. Memory that runs out is told in one line too; anything else is a bug and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class ForgeError(Exception):
    """Something to say in one line, which names the thing and the remedy: mostly a mistake of the user's."""

    exit_status = 2


class ConfigError(ForgeError):
    """A key, a value, or a combination of them that cannot work."""


class DataError(ForgeError):
    """Data that is missing, damaged, too short, or does not fit the model."""


class CheckpointError(ForgeError):
    """A checkpoint that cannot be read, written, or used with this config."""


class RunError(ForgeError):
    """A run that cannot go on: an unwritable folder, too many bad steps, a missing device."""


class DonatedError(ForgeError):
    """A `TrainState` was used after a train step took its storage (`donate=True`)."""


class RankError(ForgeError):
    """Another rank failed or hung, which ended this one too."""

    exit_status = 1


class Stopped(ForgeError):
    """A signal ended the run, after saving; the exit status is the shell's for that signal, 130 for Ctrl-C."""

    def __init__(self, number: signal.Signals, message: str) -> None:
        super().__init__(f"stopped by {number.name}: {message}")
        self.exit_status = 128 + number


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'dim'?)` for the nearest known word, or an empty string."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""
