"""What an experiment may watch: hooks get plain values, and no way to change the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from forge.config import JobConfig
from forge.training.state import StepResult


@frozen
class StepEnd:
    """One update, as plain floats."""

    step: int  # updates made, this one included
    loss: float
    grad_norm: float  # before clipping
    lr: float
    tokens: int
    skipped: bool


class Hook:
    """Override what you need.

    A hook that raises stops the run, and the exception is passed on; on one process the state is saved first, if an
    update was made.
    """

    def on_train_begin(self, config: JobConfig, step: int) -> None:
        """Before the first update; `step` updates were made in earlier runs."""

    def on_step_end(self, event: StepEnd) -> None:
        """After every update. Reading its numbers waits for the device, which a run without hooks does not.

        After a rollback, steps come again.
        """

    def on_eval_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation."""

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """After a checkpoint is complete on disk; with checkpoint.async_save, after it was begun."""

    def on_train_end(self, step: int) -> None:
        """After the last update and its checkpoint, also when a signal ended the run."""


class HookRunner(Hook):
    """Several hooks as one, called in order."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = tuple(hooks)

    def on_train_begin(self, config: JobConfig, step: int) -> None:
        for hook in self.hooks:
            hook.on_train_begin(config, step)

    def on_step_end(self, event: StepEnd) -> None:
        for hook in self.hooks:
            hook.on_step_end(event)

    def on_eval_end(self, step: int, metrics: Mapping[str, float]) -> None:
        for hook in self.hooks:
            hook.on_eval_end(step, metrics)

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        for hook in self.hooks:
            hook.on_checkpoint_save(step, path)

    def on_train_end(self, step: int) -> None:
        for hook in self.hooks:
            hook.on_train_end(step)

    def step_ended(self, step: int, result: StepResult) -> None:
        """Read the result from the device, once, if anybody wants it."""
        if self.hooks:
            self.on_step_end(
                StepEnd(
                    step=step,
                    loss=float(result.loss),
                    grad_norm=float(result.grad_norm),
                    lr=float(result.lr),
                    tokens=int(result.tokens),
                    skipped=bool(result.skipped),
                )
            )
