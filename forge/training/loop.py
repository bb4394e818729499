"""The loop: feed the step, and report, evaluate and save around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attrs import frozen

from forge.config import JobConfig
from forge.data.batch import Batch
from forge.errors import CheckpointError
from forge.logging import get_logger
from forge.metrics import MetricsTracker, StepMetrics
from forge.metrics.timeline import DATA, span
from forge.resilience import HealthCheck, Interruption, SkipLimit, TooManySkips
from forge.training.hooks import HookRunner
from forge.training.progress import Progress
from forge.training.runtime import Runtime
from forge.training.state import StepResult, TrainState, is_donated
from forge.training.step import TrainStep

log = get_logger(__name__)


@frozen
class Loop:
    """What the loop is made of; every part a function or a value, so that a test can put in its own."""

    config: JobConfig
    runtime: Runtime
    batches: Iterator[Batch]  # of the updates that remain, in order
    step_at: Callable[[int, TrainState], tuple[TrainStep, TrainState]]  # the step for update n, and the state for it
    evaluate: Callable[[TrainState], dict[str, float]] | None
    save: Callable[[TrainState, bool, bool], Path]  # the flags: wait until it is on disk; remove old ones then
    check: HealthCheck
    before_step: Callable[[int], None]  # profiling
    beat: Callable[[str], None]  # the watchdog's: what comes next
    tracker: MetricsTracker
    hooks: HookRunner
    progress: Progress


def run_loop(state: TrainState, loop: Loop, interruption: Interruption) -> TrainState:
    """Train until the last step or an interruption, and save there.

    Should a hook, an evaluation or the data fail, the state is saved before the exception goes on, where there is one
    process; of several nothing is saved then.

    Raises:
        TooManySkips: the last good checkpoints stay, rather than make room for this state.
    """
    saved_at: int | None = None

    def save(state: TrainState, step: int, final: bool, prune: bool = True) -> None:
        nonlocal saved_at
        if step != saved_at and _save(loop, state, step, final, prune):
            saved_at = step

    step = int(state.step)
    try:
        skips = SkipLimit(loop.config.train.max_consecutive_skips, loop.config.metrics.log_interval, step)
        exchange, stop = loop.runtime.delayed_max(), False
        while step < loop.config.train.steps and not stop:
            loop.before_step(step + 1)
            state, result = _one_step(state, step, loop)
            step += 1
            final = step == loop.config.train.steps
            _report(step, result, loop, force=final or step == 1)
            skips.note(result.skipped)
            stop = not final and interruption.agree(exchange(interruption.number))
            saves = final or stop or loop.config.checkpoint.is_due(step)
            loop.check(step, state, result, saves)
            if _due(step, loop.config.eval.interval, final):
                _evaluate(state, step, loop)
            if saves:
                # While updates are skipped, the checkpoints before them stay: a rollback may need them.
                save(state, step, final or stop, prune=not bool(result.skipped))
    except TooManySkips:
        raise
    except Exception:
        # Of several ranks only this one may have failed, and saving takes all of them.
        if loop.runtime.mesh is None and not is_donated(state) and int(state.step) > 0:
            save(state, int(state.step), final=False)
        raise
    return state


def _one_step(state: TrainState, step: int, loop: Loop) -> tuple[TrainState, StepResult]:
    loop.tracker.start_step()
    loop.beat(f"waiting for the data of step {step + 1}")
    with span(DATA), loop.tracker.waiting_for_data():
        batch = next(loop.batches)
    loop.beat(f"in step {step + 1}")
    train_step, state = loop.step_at(step, state)
    return train_step(state, batch.to(loop.runtime.device))


def _due(step: int, interval: int, final: bool) -> bool:
    return interval > 0 and (final or step % interval == 0)


def _report(step: int, result: StepResult, loop: Loop, force: bool) -> None:
    """Log on logging steps; nothing waits for the device on the others."""
    loop.beat(f"in the log and the hooks of step {step}")
    parts = {"ce_loss": result.ce_loss, "z_loss": result.z_loss, "aux_loss": result.aux_loss}
    routing = {name: getattr(result, name) for name in ("moe_balance", "moe_entropy", "moe_dropped")}
    parts |= {name: value for name, value in routing.items() if value is not None}
    by_source = None
    if result.source_loss is not None and result.source_tokens is not None:
        by_source = (result.source_loss, result.source_tokens)
    metrics = loop.tracker.end_step(
        step,
        result.loss,
        result.grad_norm,
        result.lr,
        result.tokens,
        skipped=result.skipped,
        by_source=by_source,
        force=force,
        **parts,
    )
    loop.progress.advance(step, {} if metrics is None else _shown(metrics))
    loop.hooks.step_ended(step, result)


def _shown(metrics: StepMetrics) -> dict[str, float | str]:
    """The numbers of a log line; rates only where there are any."""
    rates: dict[str, float | str] = {}
    if metrics.tokens_per_sec:
        rates = {"tok/s": metrics.tokens_per_sec, "mfu": metrics.mfu}
    memory = f"{metrics.peak_gb:.1f}/{metrics.total_gb:.0f}GB"
    skipped: dict[str, float | str] = {"skipped": f"{metrics.skipped:.0f}"} if metrics.skipped else {}
    return {"loss": metrics.loss, "lr": metrics.lr, "grad_norm": metrics.grad_norm, **skipped, **rates, "mem": memory}


def _evaluate(state: TrainState, step: int, loop: Loop) -> None:
    if loop.evaluate is None:
        return
    with loop.tracker.excluded("eval"):
        metrics = loop.evaluate(state)
    loop.tracker.log_eval(metrics, step)
    loop.progress.note(f"[step {step}] held out: " + describe_eval(metrics))
    loop.hooks.on_eval_end(step, metrics)


def describe_eval(metrics: Mapping[str, float]) -> str:
    """One line of held-out numbers."""
    line = f"loss {metrics['eval/loss']:.4f} | perplexity {metrics['eval/perplexity']:.4g}"
    if "eval/bits_per_byte" in metrics:
        line += f" | bits per byte {metrics['eval/bits_per_byte']:.4f}"
    for key, value in metrics.items():
        name = key.removeprefix("eval/").removesuffix("/loss")
        line += f" | {name} {value:.4f}" if key == f"eval/{name}/loss" else ""
    return line


def _save(loop: Loop, state: TrainState, step: int, final: bool, prune: bool) -> bool:
    """Save; a failure in the middle of a run is a warning, at its end an error."""
    loop.beat(f"in the checkpoint of step {step}")
    with loop.tracker.excluded("checkpoint"):
        try:
            path = loop.save(state, final, prune)
        except CheckpointError as error:
            if final:
                raise
            log.warning("%s; training goes on, the checkpoints before it are kept", error)
            return False
    loop.hooks.on_checkpoint_save(step, path)
    return True
