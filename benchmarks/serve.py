"""The process of a side apart: a question, then counts of updates, each answered by the loss of the last."""

from __future__ import annotations

import json
import os
import sys
from typing import IO

from torch import Tensor

from benchmarks.peers import initial_weights
from benchmarks.regimes import Regime
from benchmarks.sides import APART


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Drive the side that is asked for, until there are no more counts."""
    question, left = json.loads(questions.readline()), 0
    answers.write("ready\n")

    def wait() -> bool:
        nonlocal left
        if not left:
            left = int(questions.readline() or 0)
        return left > 0

    def tell(loss: Tensor) -> None:
        nonlocal left
        left -= 1
        if not left:
            answers.write(f"{float(loss)!r}\n")

    regime, device, precision = Regime(**question["regime"]), question["device"], question["precision"]
    APART[question["side"]](regime, device, precision, initial_weights(regime), wait, tell)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # what libraries print goes to stderr
        serve(sys.stdin, answers)
