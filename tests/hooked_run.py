"""Trains a preset with a hook that does something to one rank: `python tests/hooked_run.py PRESET WHAT RANK STEP`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import cli
from forge.config import load_config
from forge.training import run_training
from forge.training.hooks import Hook


class Mishap(Hook):
    """What happens to one rank after a step; every rank says which step it made."""

    def __init__(self, what: str, rank: int, step: int) -> None:
        self.what, self.rank, self.step = what, rank, step

    def on_step_end(self, event):
        print(f"made {event.step}", file=sys.stderr, flush=True)
        if event.step == self.step and os.environ.get("RANK", "0") == str(self.rank):
            self.happen()

    def happen(self):
        if self.what == "sleep":
            sleep_for_long()
        if self.what == "raise":
            raise ValueError("a bug in the hook")
        os.kill(os.getpid(), signal.Signals[self.what])


def sleep_for_long():
    time.sleep(600)


def train(argv):
    """The command that stands in for `train`."""
    preset, what, rank, step = argv
    run_training(load_config(Path(preset)), hooks=Mishap(what, int(rank), int(step)))


if __name__ == "__main__":
    cli.COMMANDS["train"] = train
    argv = ["train", *sys.argv[1:]]
    sys.exit((cli._main_of_a_rank if "RANK" in os.environ else cli.main)(argv))
