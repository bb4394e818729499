"""`transformers.Trainer` behind the interface of the peers: its own loop, let go one update, or several, at a time.

For its memory the loop runs on a thread of this process, which needs no more than that. It is timed on the main thread
of a process apart: two threads that compute have a pool of OpenMP threads each, more than there are cores, and libgomp
then lets all of them sleep between any two operators; a small step of every side would take three times as long.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.apart import Tell, Wait
from benchmarks.peers import BATCHES, Runner, batches, build_transformers, plain_optimizers
from benchmarks.regimes import Device, Precision, Regime, job_config
from forge.data.batch import IGNORE
from forge.errors import RunError

UPDATES = 10**6
"""More than are ever taken: the loop ends when it is told to."""


class _Rows(Dataset[dict[str, Tensor]]):
    """The sequences of the peers' batches, in their order, over and over."""

    def __init__(self, regime: Regime) -> None:
        ids = torch.cat([batch.input_ids[0] for batch in islice(batches(regime, "cpu"), BATCHES)])
        labels = torch.cat((torch.full_like(ids[:, :1], IGNORE), ids[:, 1:]), dim=1)  # the model shifts them itself
        self.rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
        self.count = UPDATES * regime.batch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index % len(self.rows)]


class _Loop:
    """A `Trainer.train()` on a thread that waits before each update; it stops when this object is gone."""

    def __init__(self, build: Callable[[Wait, Tell], Any]) -> None:
        self.go, self.done = go, done = SimpleQueue[bool](), SimpleQueue[Tensor | BaseException]()
        trainer = build(go.get, done.put)

        def train() -> None:
            try:
                trainer.train()
            except BaseException as error:  # handed to whoever waits for the update
                done.put(error)

        def stop() -> None:
            go.put(False)
            thread.join()  # a thread that is still at work when the interpreter ends aborts the process

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        weakref.finalize(self, stop)

    def step(self) -> Tensor:
        """Let the loop take one update, and wait for it."""
        self.go.put(True)
        result = self.done.get()
        if isinstance(result, BaseException):
            raise RunError(f"transformers.Trainer failed: {result}") from result
        return result


def trainer_runner(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None = None
) -> Runner:
    """The model of `transformers_runner` in `transformers.Trainer`, with the same optimizer and no schedule.

    Raises:
        RunError: transformers or accelerate is not installed.
    """
    loop = _Loop(lambda wait, tell: _trainer(regime, device, precision, weights, wait, tell))
    return Runner("trainer", loop.step)


def drive_trainer(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None, wait: Wait, tell: Tell
) -> None:
    """`trainer_runner` on the thread that calls.

    Raises:
        RunError: transformers or accelerate is not installed.
    """
    _trainer(regime, device, precision, weights, wait, tell).train()


def _trainer(
    regime: Regime, device: Device, precision: Precision, weights: Mapping[str, Tensor] | None, wait: Wait, tell: Tell
) -> Any:
    config = job_config(regime, device, precision)
    model = build_transformers(config.model, weights)
    (optimizer,) = plain_optimizers(dict(model.to(device).named_parameters()), config)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    return _gated(
        wait,
        tell,
        model=model,
        args=_arguments(regime, device, precision, config.train.grad_clip_norm),
        train_dataset=_Rows(regime),
        optimizers=(optimizer, constant),
    )


def _arguments(regime: Regime, device: Device, precision: Precision, max_norm: float | None) -> Any:
    from transformers import TrainingArguments

    try:
        return TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=regime.batch,
            max_steps=UPDATES,
            max_grad_norm=max_norm or 0.0,
            bf16=precision == "bf16",
            use_cpu=device == "cpu",
            train_sampling_strategy="sequential",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
    except ImportError:
        raise RunError("transformers.Trainer needs accelerate: pip install -e '.[bench]'") from None


def _gated(wait: Wait, tell: Tell, **arguments: Any) -> Any:
    """A Trainer that waits before each update and tells its loss, which the class itself only sums up."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Told(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.told = super().training_step(*args, **kwargs)
            return self.told

    class Gate(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not wait():
                control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(trainer.told.detach())

    trainer = Told(**arguments, callbacks=[Gate()])
    trainer.remove_callback(PrinterCallback)  # prints a summary where the loop ends
    return trainer
