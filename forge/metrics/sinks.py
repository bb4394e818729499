"""Where metrics go. A sink opened at step k shows one value for each step and key, and nothing of later steps.

A run that is resumed from step k has often logged beyond it: those values belong to updates that will be made again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from shutil import disk_usage
from typing import Any, Protocol

from forge.config import JobConfig
from forge.errors import ConfigError, RunError
from forge.files import replace_file, step_lines
from forge.logging import process_rank
from forge.metrics.logger import format_metrics

Metrics = Mapping[str, float]

_ROOM = 1 << 20
"""Bytes free on a disk that was full before TensorBoard's writer is opened anew."""


class Sink(Protocol):
    """What takes metrics."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Take the values of one step, which is never smaller than the step before."""

    def hyperparameters(self, flat: Mapping[str, Any]) -> None:
        """Take the config as `section.key -> value`, before the first metrics."""

    def close(self) -> None:
        """Write what is left; nothing is logged afterwards."""


def build_sinks(config: JobConfig, run_dir: Path, *, resume_step: int) -> list[Sink]:
    """Open the sinks that `config.metrics` names; none on any rank but 0. The console is the caller's.

    Args:
        config: of the run.
        run_dir: holds `metrics.jsonl`, `tensorboard/` and `wandb/`.
        resume_step: last step that the run keeps, 0 for a fresh one; what was logged after it is removed.

    Raises:
        ConfigError: a package is missing.
        RunError: a file cannot be written.
    """
    sinks: list[Sink] = []
    if process_rank() != 0:
        return sinks
    if config.metrics.jsonl:
        sinks.append(JsonlSink(run_dir / "metrics.jsonl", resume_step))
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
    if config.metrics.wandb_project is not None:
        sinks.append(WandbSink(config.metrics.wandb_project, run_dir, resume_step))
    return sinks


_SHORT_NAMES = {
    "train/loss": "loss",
    "train/lr": "lr",
    "train/grad_norm": "grad_norm",
    "train/tokens_per_sec": "tok/s",
    "train/mfu": "mfu",
}
_HIDDEN = {"train/loss_ema", "train/step_time_sec", "train/data_seconds"}


class ConsoleSink:
    """One `format_metrics` line a step: what a person watches, without prefixes."""

    def __init__(self, print: Callable[[str], None], *, color: bool = False) -> None:
        self._print = print
        self._color = color

    def log(self, step: int, metrics: Metrics) -> None:
        self._print(format_metrics(step, _console_view(metrics), color=self._color))

    def hyperparameters(self, flat: Mapping[str, Any]) -> None:
        """Nothing: a screen full of keys hides the first loss."""

    def close(self) -> None:
        """Nothing to close."""


class JsonlSink:
    """Strict JSON, one object a line: `{"step": 12, "train/loss": 3.1, ...}`, on the disk when `log` returns.

    JSON has no NaN: non-finite values are the texts "nan", "inf" and "-inf". Hyper-parameters are in the run's
    `config.toml`, not here: every line is a step.
    """

    def __init__(self, path: str | Path, resume_step: int) -> None:
        """Drop, atomically, the lines after `resume_step` and any that was half written, then append.

        Raises:
            RunError: the file cannot be written.
        """
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = _kept_lines(self._path, resume_step)
            replace_file(self._path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self._path, error) from None
        last = lines[-1]["step"] if lines else 0
        self._once = _Once(last, {key for line in lines if line["step"] == last for key in line})

    def log(self, step: int, metrics: Metrics) -> None:
        fresh = self._once.new(step, metrics)
        if not fresh:
            return
        line = {"step": step} | {key: _strict(value) for key, value in fresh.items()}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def hyperparameters(self, flat: Mapping[str, Any]) -> None:
        """Nothing: they are in `config.toml` beside the file."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written, `log` has reported
            self._file.close()


class TensorBoardSink:
    """TensorBoard scalars; hyper-parameters as a table under Text."""

    def __init__(self, dir: str | Path, resume_step: int) -> None:
        """Remove the events after `resume_step` from the files of earlier processes, then open a new file.

        Raises:
            ConfigError: tensorboard is not installed.
            RunError: the folder cannot be written.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that tensorboard imports
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError(
                    "metrics.tensorboard = true needs tensorboard: pip install tensorboard, or switch it off"
                ) from None
        self._dir, self._first_step, self._open = Path(dir), resume_step + 1, SummaryWriter
        try:
            self._once = _Once(resume_step, _purge_events(self._dir, resume_step))
            # A TensorBoard that is open on the folder has read the removed events: purge_step makes it forget them.
            self._writer: SummaryWriter | None = SummaryWriter(str(dir), purge_step=self._first_step)
        except OSError as error:
            raise _unwritable(self._dir, error) from None

    def log(self, step: int, metrics: Metrics) -> None:
        fresh = self._once.new(step, metrics)
        try:
            if self._writer is None:
                if disk_usage(self._dir).free < _ROOM:  # a writer that finds no room dies aloud, in its own thread
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._writer = self._open(str(self._dir))
            for key, value in fresh.items():
                self._writer.add_scalar(key, value, step)
            self._writer.flush()
        except OSError as error:
            # Its thread has ended: later values open a file of their own. Those of now may be written in part, and are
            # not written again, so that a step keeps one value.
            self._writer = None
            raise _unwritable(self._dir, error) from None

    def hyperparameters(self, flat: Mapping[str, Any]) -> None:
        assert self._writer is not None  # nothing was logged, so nothing has failed
        rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in flat.items())
        table = f"| key | value |\n| --- | --- |\n{rows}"
        self._writer.add_text("config", table, self._first_step)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written, `log` has reported
            if self._writer is not None:
                self._writer.close()


class WandbSink:
    """Weights & Biases. The run's id is kept in `<run_dir>/wandb_run_id`, so that a resume goes on with its curves.

    With WANDB_MODE=offline nothing is sent: `<run_dir>/wandb` holds a folder a start, for `wandb sync` in their order.
    """

    def __init__(self, project: str, run_dir: str | Path, resume_step: int = 0) -> None:
        """Start a run, or rewind the folder's run to `resume_step`.

        Raises:
            ConfigError: wandb is not installed, not logged in, or not reached.
        """
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"metrics.wandb_project = {project!r} needs wandb: pip install wandb, or leave the key unset"
            ) from None
        id_file = Path(run_dir) / "wandb_run_id"
        resumes = resume_step > 0 and id_file.exists()
        rewind: dict[str, Any] = (
            {"resume_from": f"{id_file.read_text().strip()}?_step={resume_step}"} if resumes else {}
        )
        try:
            self._run = wandb.init(project=project, dir=str(run_dir), **rewind)
        except wandb.Error as error:
            raise ConfigError(
                f"metrics.wandb_project = {project!r}: {error} WANDB_MODE=offline keeps the run in {run_dir}/wandb"
                " until `wandb sync`"
            ) from None
        if not resumes:
            id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def hyperparameters(self, flat: Mapping[str, Any]) -> None:
        self._run.config.update(dict(flat), allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


class _Once:
    """Lets each key through once a step; steps do not go back, so the newest step's keys are all it holds.

    A run resumed at its last step evaluates that step again: the value that stands is the first.
    """

    def __init__(self, step: int, keys: set[str]) -> None:
        self._step, self._keys = step, keys

    def new(self, step: int, metrics: Metrics) -> dict[str, float]:
        if step != self._step:
            self._step, self._keys = step, set()
        fresh = {key: value for key, value in metrics.items() if key not in self._keys}
        self._keys |= fresh.keys()
        return fresh


def _console_view(metrics: Metrics) -> dict[str, float | str]:
    view: dict[str, float | str] = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    if "memory/peak_gb" in metrics and "memory/total_gb" in metrics:
        view["mem"] = f"{metrics['memory/peak_gb']:.1f}/{metrics['memory/total_gb']:.0f}GB"
    for key, value in metrics.items():
        shown = key in _SHORT_NAMES or key in _HIDDEN or key.startswith("memory/")
        if not shown and not (key == "train/skipped" and not value):
            view[key.removeprefix("train/")] = value
    return view


def _strict(value: float) -> float | str:
    value = value if isinstance(value, int) else float(value)
    return value if math.isfinite(value) else str(value)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _kept_lines(path: Path, resume_step: int) -> list[dict[str, Any]]:
    """Whole lines of steps up to `resume_step`, each key once a step; a run from step 0 keeps none."""
    if resume_step == 0 or not path.exists():
        return []
    kept: list[dict[str, Any]] = []
    seen: set[tuple[int, str]] = set()
    for step, line in step_lines(path):
        if step > resume_step:
            continue
        fresh = {key: value for key, value in line.items() if key == "step" or (step, key) not in seen}
        seen.update((step, key) for key in fresh)
        if len(fresh) > 1:
            kept.append(fresh)
    return kept


def _purge_events(dir: Path, resume_step: int) -> set[str]:
    """Rewrite TensorBoard's event files without the events after `resume_step`; returns the tags logged at it.

    The marks of earlier restarts go too: where files of one second are read out of order, they hide good events.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    tags: set[str] = set()
    for path in sorted(dir.glob("events.out.tfevents.*")):
        if resume_step == 0:  # a run from the start
            path.unlink()
            continue
        frames = []
        for frame, payload in _records(path.read_bytes()):
            event = Event.FromString(payload)
            if event.step > resume_step or event.HasField("session_log"):
                continue
            frames.append(frame)
            if event.step == resume_step:
                tags.update(value.tag for value in event.summary.value)
        replace_file(path, b"".join(frames))
    return tags


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Whole records of a TFRecord file and their payloads: length u64, crc u32, payload, crc u32."""
    at = 0
    while at + 12 <= len(data):
        size = struct.unpack_from("<Q", data, at)[0]
        end = at + 12 + size + 4
        if end > len(data):
            return  # half written
        yield data[at:end], data[at + 12 : end - 4]
        at = end


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be written: {error.strerror or error}; free the disk or choose another --run-dir")
