"""Hooks see plain values, in order, and cost nothing where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.config import JobConfig
from forge.training.hooks import Hook, HookRunner, StepEnd
from forge.training.state import StepResult


def _result(**changes) -> StepResult:
    values = {name: torch.tensor(0.0) for name in ("loss", "ce_loss", "z_loss", "aux_loss", "grad_norm", "lr")}
    values |= {"tokens": torch.tensor(7), "skipped": torch.tensor(False), **changes}
    return StepResult(**values)


class Recorder(Hook):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def on_train_begin(self, config, step):
        self.seen.append((self.name, "begin", step))

    def on_step_end(self, event):
        self.seen.append((self.name, "step", event))

    def on_eval_end(self, step, metrics):
        self.seen.append((self.name, "eval", step, metrics))

    def on_checkpoint_save(self, step, path):
        self.seen.append((self.name, "save", step, path))

    def on_train_end(self, step):
        self.seen.append((self.name, "end", step))


def test_every_event_reaches_every_hook_in_order():
    seen = []
    runner = HookRunner([Recorder("a", seen), Recorder("b", seen)])
    runner.on_train_begin(JobConfig(), 3)
    runner.on_eval_end(4, {"eval/loss": 1.0})
    runner.on_checkpoint_save(4, Path("x"))
    runner.on_train_end(5)
    events = [("begin", 3), ("eval", 4, {"eval/loss": 1.0}), ("save", 4, Path("x")), ("end", 5)]
    assert seen == [(name, *event) for event in events for name in "ab"]


def test_a_step_reaches_a_hook_as_plain_values():
    seen = []
    result = _result(
        loss=torch.tensor(2.5), grad_norm=torch.tensor(float("inf")), lr=torch.tensor(0.5), skipped=torch.tensor(True)
    )
    HookRunner([Recorder("a", seen)]).step_ended(9, result)
    assert seen == [("a", "step", StepEnd(step=9, loss=2.5, grad_norm=float("inf"), lr=0.5, tokens=7, skipped=True))]
    assert [type(getattr(seen[0][2], name)) for name in ("loss", "tokens", "skipped")] == [float, int, bool]


def test_without_hooks_nothing_waits_for_the_device():
    result = _result(loss=torch.empty((), device="meta"))  # reading it would raise
    HookRunner().step_ended(1, result)
    with pytest.raises(RuntimeError):
        HookRunner([Hook()]).step_ended(1, result)


def test_a_hook_that_overrides_nothing_does_nothing():
    hook = Hook()
    hook.on_train_begin(JobConfig(), 0)
    hook.on_step_end(StepEnd(1, 1.0, 1.0, 1.0, 1, False))
    hook.on_eval_end(1, {})
    hook.on_checkpoint_save(1, Path("x"))
    hook.on_train_end(1)


def test_a_step_event_cannot_be_changed():
    with pytest.raises(AttributeError):
        StepEnd(1, 1.0, 1.0, 1.0, 1, False).loss = 0.0
