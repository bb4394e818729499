"""A side in a process of its own, told how many updates to take: `apart` here, `benchmarks.serve` there.

The process may have packages of its own: a peer whose requirements contradict `constraints.txt` lives in `.peers/SIDE`
(`make peers`), which only the processes of that side see, before the packages of the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.peers import Build, Runner
from benchmarks.regimes import Device, Precision, Regime
from forge.errors import RunError

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".peers"

Wait = Callable[[], bool]
"""Returns when the next update may begin: whether there is one."""
Tell = Callable[[Tensor], None]
"""Is given the loss of each update, detached."""
Drive = Callable[[Regime, Device, Precision, "Mapping[str, Tensor] | None", Wait, Tell], None]
"""Builds a side and takes updates as they are asked for, until there are no more."""


def own_version(side: str) -> str | None:
    """The version of a peer that lives in a folder of its own; None = it is not there."""
    return next((found.version for found in distributions(name=side, path=[str(PEERS / side)])), None)


def environment(side: str) -> dict[str, str]:
    """The environment variables of a side's process."""
    paths = [str(PEERS / side)] if (PEERS / side).is_dir() else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def apart(side: str) -> Build:
    """The side of a name in a process of its own, from the regime's initial weights whatever it is given."""

    def build(
        regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
    ) -> Runner:
        process = _Process(side, {"regime": attrs.asdict(regime), "device": device, "precision": precision})
        return Runner(side, lambda: process.steps(1), process.steps)

    return build


def stepwise(build: Build) -> Drive:
    """A side whose updates are calls, as one that is driven."""

    def drive(
        regime: Regime,
        device: Device,
        precision: Precision,
        weights: Mapping[str, Tensor] | None,
        wait: Wait,
        tell: Tell,
    ) -> None:
        runner = build(regime, device, precision, weights)
        while wait():
            tell(runner.step())

    return drive


class _Process:
    """A side at work in a process that is told how many updates to take; it ends when this object is gone."""

    def __init__(self, side: str, question: dict[str, Any]) -> None:
        self.side = side
        self.lines = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process writes to it)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve"], cwd=ROOT, env=environment(side), text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.lines,
        )  # fmt: skip
        weakref.finalize(self, _end, self.child)
        self._ask(json.dumps({"side": side} | question))

    def steps(self, count: int) -> Tensor:
        """Let the side take some updates, and wait for the loss of the last."""
        return torch.tensor(float(self._ask(str(count))))

    def _ask(self, line: str) -> str:
        assert self.child.stdin is not None and self.child.stdout is not None
        try:
            self.child.stdin.write(line + "\n")
            if answer := self.child.stdout.readline():
                return answer
        except BrokenPipeError:
            pass
        self.child.wait()
        self.lines.seek(0)
        raise RunError(f"{self.side} failed: {(self.lines.read().strip().splitlines() or ['no answer'])[-1]}")


def _end(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    child.stdout.close()
    child.wait()
