"""From the results of training steps to numbers on logging steps, without waiting for the device in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from attrs import frozen
from torch import Tensor

from forge.config import JobConfig, flatten_config
from forge.errors import RunError
from forge.logging import get_logger
from forge.metrics.memory import DeviceMemoryMonitor, memory_utilization
from forge.metrics.mfu import compute_mfu, device_peak_tflops
from forge.metrics.sinks import Sink, build_sinks
from forge.metrics.stopwatch import Stopwatch
from forge.pytree import register_node

log = get_logger(__name__)

Number = float | Tensor
"""A number, or a 0-dim tensor that is read on the next logging step."""


@register_node
@frozen
class StepMetrics:
    """A logging step: the values of its update, and rates over the window since the logging step before."""

    loss: float = 0.0
    grad_norm: float = 0.0  # before clipping
    lr: float = 0.0
    tokens_per_sec: float = 0.0  # over all devices; 0 while only the first step was taken
    mfu: float = 0.0  # 0 to 1; 0 while only the first step was taken
    step_time_sec: float = 0.0  # mean
    allocated_gb: float = 0.0  # GiB, as the next three
    peak_gb: float = 0.0  # since the logging step before
    reserved_gb: float = 0.0
    total_gb: float = 0.0
    mem_utilization: float = 0.0  # peak / total
    skipped: float = 0.0  # updates of the window that were not made


class _Step(NamedTuple):
    loss: Number
    tokens: Number  # over all devices
    skipped: Number
    by_source: Tensor | None = None  # fp64 (2, sources): summed loss and tokens; zero where the update was skipped


class MetricsTracker:
    """Collects what steps return, and on logging steps hands it to the sinks.

    Rates are over the wall clock of the window since the last logging step, waiting for data included and what ran in
    `excluded(...)` left out. The first step (compilation, warm-up) is in no rate.

    Args:
        config: gives the model, the sequence length, the log interval, the EMA's decay and the peak.
        num_gpus: devices that share the tokens of a step.
        gpu_peak_tflops: peak of one; unset = `metrics.peak_tflops`, else found from the device.
        device: what this process trains on.
        sinks: take the metrics, and are closed by `close`.
        clock: seconds, monotonic.
        ema_state: what `ema_state()` gave in the process that is continued.
    """

    def __init__(
        self,
        config: JobConfig,
        num_gpus: int = 1,
        gpu_peak_tflops: float | None = None,
        *,
        device: torch.device | str = "cpu",
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.perf_counter,
        ema_state: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._config, self._num_gpus, self._ema = config, num_gpus, ema_state
        self._device = torch.device(device)
        self._peak = gpu_peak_tflops or config.metrics.peak_tflops or _peak_tflops(config, self._device)
        snapshots = str(Path(config.run_dir) / "memory_snapshots")
        self._memory = DeviceMemoryMonitor(self._device, config.profiling.memory_snapshot_step, snapshots)
        self._watch, self._clock = Stopwatch(clock, self._wait), clock
        self._data_sec = 0.0  # waited for data in the window
        self._steps: list[_Step] = []  # of the window
        self._smoothed = 0  # how many of them are in the EMA
        self._warm = False  # whether the first step is done
        self._first_sec: float | None = None  # seconds of the first step, while it is in the window
        self._sinks = list(sinks)

    def init_backends(self, config: JobConfig, *, resume_step: int = 0) -> None:
        """Open the sinks that `config.metrics` names and give them the config; call after the process group is made.

        Args:
            config: of the run.
            resume_step: what was logged after this step is removed; 0 = a fresh run.
        """
        for sink in build_sinks(config, Path(config.run_dir), resume_step=resume_step):
            sink.hyperparameters(flatten_config(config))
            self._sinks.append(sink)

    def start_step(self) -> None:
        """Mark the beginning of a step: that of the first; later windows begin where the last one ended."""
        if not self._warm:
            self._watch.restart()

    def end_step(
        self,
        step: int,
        loss: Number,
        grad_norm: Number,
        lr: Number,
        tokens_in_step: Number,
        *,
        skipped: Number | None = None,
        by_source: tuple[Tensor, Tensor] | None = None,
        force: bool = False,
        **extra: Number,
    ) -> StepMetrics | None:
        """Take the results of update `step`; tensors are not waited for unless it is a logging step.

        Args:
            step: number of the update, from 1.
            loss: of the global batch.
            grad_norm: before clipping.
            lr: used by the update.
            tokens_in_step: over all devices.
            skipped: whether the update was not made; logged as the count in the window.
            by_source: summed loss and tokens of each data source, (sources,) each; over the window they are logged as
                `train/loss/<name>` and `train/tokens/<name>`.
            force: log whatever the interval, for the last step of a run.
            extra: logged as `train/<name>`.

        Returns: the metrics on a logging step (every `metrics.log_interval`), else None.
        """
        skips = _detached(0 if skipped is None else skipped)
        sums = None if by_source is None else _kept(by_source, skips)
        self._steps.append(_Step(_detached(loss), _detached(tokens_in_step), skips, sums))
        if not self._warm:
            self._end_first_step()
        if not force and step % self._config.metrics.log_interval:
            return None
        named = {"loss": loss, "grad_norm": grad_norm, "lr": lr, **extra}
        values = dict(zip(named, _read(list(named.values())), strict=True))  # waits for the device
        if skipped is not None:
            values["skipped"] = sum(_read([past.skipped for past in self._steps]))
        return self._report(step, values)

    @contextmanager
    def waiting_for_data(self) -> Generator[None, None, None]:
        """Count the time inside as the step's wait for data: its mean is `train/data_seconds`, a part of the step's."""
        start = self._clock()
        try:
            yield
        finally:
            self._data_sec += self._clock() - start

    def excluded(self, name: str) -> AbstractContextManager[None]:
        """Leave the time inside out of every rate and report it as `time/<name>` on the next logging step."""
        return self._watch.excluded(name)

    def log_eval(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of an evaluation after update `step`; names without a group go under `eval/`."""
        self._send(step, {key if "/" in key else f"eval/{key}": value for key, value in metrics.items()})

    def ema_state(self) -> tuple[float, float]:
        """(weighted sum, weight) of the losses of all updates so far; their quotient is the smoothed loss.

        Waits for the device. Kept in a checkpoint and given to the next tracker, it continues the curve.
        """
        decay = self._config.metrics.ema_decay
        for loss in _read([past.loss for past in self._steps[self._smoothed :]]):
            if math.isfinite(loss):  # a NaN would stay in the mean for ever
                self._ema = (decay * self._ema[0] + (1 - decay) * loss, decay * self._ema[1] + (1 - decay))
        self._smoothed = len(self._steps)
        return self._ema

    def close(self) -> None:
        """Close every sink, the others too where one fails."""
        with ExitStack() as stack:
            while self._sinks:
                stack.callback(self._sinks.pop().close)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink.log(step, metrics)
            except RunError as error:
                log.warning("%s; training goes on", error)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end_first_step(self) -> None:
        self._wait()
        self._first_sec, self._warm = self._watch.seconds(), True
        self._watch.restart()

    def _report(self, step: int, values: dict[str, float]) -> StepMetrics:
        """Send the window that ends with `step`, and begin the next one."""
        memory = self._memory.report(step)
        step_time, tokens_per_sec = self._timing()
        rates: dict[str, float] = {}
        if tokens_per_sec is not None:
            seq_len = self._config.train.seq_len
            mfu = compute_mfu(self._config.model, tokens_per_sec, self._num_gpus, self._peak, seq_len)
            rates = {"tokens_per_sec": tokens_per_sec, "mfu": mfu}
        smoothed, weight = self.ema_state()
        loss_ema = {"loss_ema": smoothed / weight} if weight else {}
        waited = self._data_sec / len(self._steps)
        train = values | rates | {"step_time_sec": step_time, "data_seconds": waited} | loss_ema | self._by_source()
        utilization = memory_utilization(memory)
        apart = self._watch.take_apart()
        self._steps, self._smoothed, self._first_sec, self._data_sec = [], 0, None, 0.0
        self._watch.restart()
        self._send(
            step,
            {f"train/{name}": value for name, value in train.items()}
            | {f"memory/{name}": value for name, value in (memory | {"utilization": utilization}).items()}
            | {f"time/{name}": seconds for name, seconds in apart.items()},
        )
        update = {name: values[name] for name in ("loss", "grad_norm", "lr")}
        return StepMetrics(
            **update,
            **rates,
            step_time_sec=step_time,
            **memory,
            mem_utilization=utilization,
            skipped=float(values.get("skipped", 0)),
        )

    def _by_source(self) -> dict[str, float]:
        """Mean loss and number of tokens of each data source over the window; no loss of one that was not drawn."""
        sums = [step.by_source for step in self._steps if step.by_source is not None]
        if not sums:
            return {}
        found: dict[str, float] = {}
        names = [source.name for source in self._config.data.sources]
        for name, loss, tokens in zip(names, *torch.stack(sums).sum(0).tolist(), strict=True):
            found |= {f"loss/{name}": loss / tokens} if tokens else {}
            found[f"tokens/{name}"] = tokens
        return found

    def _timing(self) -> tuple[float, float | None]:
        """Mean seconds a step, and tokens/s of the window; None where it holds the first step alone."""
        seconds = self._watch.seconds()
        timed = self._steps if self._first_sec is None else self._steps[1:]
        if not timed:
            assert self._first_sec is not None
            return self._first_sec, None
        tokens = sum(_read([past.tokens for past in timed]))
        return seconds / len(timed), tokens / seconds if seconds > 0 else None


def _peak_tflops(config: JobConfig, device: torch.device) -> float:
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return device_peak_tflops(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def _detached(value: Number) -> Number:
    return value.detach() if isinstance(value, Tensor) else value


def _kept(by_source: tuple[Tensor, Tensor], skipped: Number) -> Tensor:
    """The sums of an update as fp64 (2, sources), zeros where it was skipped: its loss may not be finite."""
    sums = torch.stack([part.detach().double() for part in by_source])
    return torch.where(torch.as_tensor(skipped, device=sums.device).bool(), 0.0, sums)


def _read(values: Sequence[Number]) -> list[float]:
    """The numbers on the host, tensors in one transfer for each device."""
    found = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    places: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for at, value in enumerate(values):
        if isinstance(value, Tensor):
            places.setdefault(value.device, []).append((at, value.detach().double()))
    for tensors in places.values():
        for (at, _), number in zip(tensors, torch.stack([tensor for _, tensor in tensors]).tolist(), strict=True):
            found[at] = number
    return found
