"""`run_training(config)`: build every part of a run, train, save, tear down."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

from attrs import evolve, frozen

from forge.checkpoint import (
    check_resumable,
    checkpoint_step,
    has_parameters_only,
    latest_sound,
    list_checkpoints,
    read_manifest,
    remove_leftovers,
    remove_newer,
)
from forge.config import JobConfig, load_config, save_config
from forge.data import Batch, Stream, share_of
from forge.errors import CheckpointError, RunError, Stopped
from forge.logging import get_logger
from forge.metrics import MetricsTracker, count_parameters
from forge.resilience import (
    Interruption,
    TooManySkips,
    Watchdog,
    batch_index,
    build_health_check,
    catch_signals,
    jump_over,
    lock_run,
    watch,
)
from forge.training.average import params_to_use
from forge.training.data_pipeline import DataPipeline, open_data, open_feed
from forge.training.eval import run_eval_sets
from forge.training.generate import Sampling
from forge.training.hooks import Hook, HookRunner
from forge.training.loop import Loop, run_loop
from forge.training.parts import Parts, build_parts, initial_state, step_for
from forge.training.profiling import profile_window
from forge.training.progress import SILENT, Progress, training_progress
from forge.training.provenance import record_start
from forge.training.reload import restore
from forge.training.runtime import Runtime, deterministic_kernels, open_runtime
from forge.training.samples import record_sample, sample_texts
from forge.training.saving import background_saver, build_save
from forge.training.scheduler import learning_rate
from forge.training.state import TrainState
from forge.training.step import TrainStep

log = get_logger(__name__)


def run_training(
    config: JobConfig,
    *,
    step_fn: TrainStep | None = None,
    hooks: Iterable[Hook] | Hook | None = None,
    data: Stream | None = None,
) -> TrainState:
    """Train as the config says, in `config.run_dir`; where that holds a checkpoint, go on from it.

    Args:
        step_fn: replaces the whole step, (state, batch) -> (state, StepResult).
        hooks: watch the run; see `forge.training.hooks`.
        data: documents to train on in the place of those that `config.data` names: a `datasets.IterableDataset`, or an
            `IteratorStream` of any Python iterator. Its position is in every checkpoint.

    Returns:
        The state after the last update.

    Raises:
        ForgeError: a mistake in config, data or run folder, or too many bad steps.
        Stopped: a signal ended the run, after saving.
    """
    runner = HookRunner([hooks] if isinstance(hooks, Hook) else hooks or ())
    run_dir = Path(config.run_dir)
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(config))
        watchdog = stack.enter_context(watch(runtime, config.distributed.watchdog_seconds, run_dir / "stacks"))
        if runtime.leads:
            stack.enter_context(lock_run(run_dir))
        stack.enter_context(deterministic_kernels(config.train.deterministic))
        saved = _find_checkpoint(config, run_dir, runtime)
        pipeline = open_data(config, runtime, data)
        parts = build_parts(config, runtime)
        state, notes = starting_state(config, parts, pipeline, saved)
        done = int(state.step)
        if done >= config.train.steps:
            if runtime.leads:
                print(f"{run_dir}: this run has finished all its {done} steps; --train.steps {2 * done} would go on.")
            return state
        if runtime.leads:
            _save_config(config, run_dir / "config.toml")
        runner.on_train_begin(config, done)
        run = _Run(config, parts, pipeline, step_fn, runner, watchdog)
        with catch_signals(config.checkpoint.stop_within_seconds, watchdog.end) as interruption:
            state = _train(run, state, notes, interruption)
        step = int(state.step)
        runner.on_train_end(step)
        if step < config.train.steps:
            assert interruption.signal is not None
            raise Stopped(interruption.signal, f"saved step {step} in {run_dir}; the same command goes on from there")
    return state


@frozen
class _Run:
    """What stays the same in every attempt of a run."""

    config: JobConfig
    parts: Parts
    data: DataPipeline
    step_fn: TrainStep | None
    hooks: HookRunner
    watchdog: Watchdog

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    def mark(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the other ranks of a failure before anything is torn down; too many skips come to all of them alike."""
        if not isinstance(error, TooManySkips):
            self.watchdog.mark(kind, error, trace)


def _train(run: _Run, state: TrainState, notes: dict[str, Any], interruption: Interruption) -> TrainState:
    """Train to the end; where too many updates are skipped, once more from a checkpoint before them."""
    while True:
        try:
            return _attempt(run, state, notes, interruption)
        except TooManySkips as error:
            failure = error.with_traceback(None)  # whose frames hold the state
        state, notes = _roll_back(run, failure, notes)


def _attempt(run: _Run, state: TrainState, notes: dict[str, Any], interruption: Interruption) -> TrainState:
    """Train on from a state of any step to the end of the run or an interruption."""
    config, parts, data, runtime = run.config, run.parts, run.data, run.parts.runtime
    done, steps, jumps = int(state.step), config.train.steps, notes.get("jumps", [])
    if runtime.leads:
        record_start(run.run_dir, config, runtime, step=done, jumps=jumps)
    with ExitStack() as stack:
        tracker = _tracker(config, runtime, run.run_dir, done, notes)
        stack.callback(tracker.close)
        progress = stack.enter_context(training_progress(steps, done)) if runtime.leads else SILENT
        _announce(config, parts, data, done, progress)
        feed = open_feed(
            data,
            config.data,
            done,
            steps,
            position=notes.get("stream"),
            pin=runtime.device.type == "cuda",
            index_at=lambda step: batch_index(jumps, step),
        )
        stack.enter_context(closing(feed))
        saver = stack.enter_context(background_saver()) if config.checkpoint.async_save else None
        step_fn = run.step_fn
        loop = Loop(
            config=config,
            runtime=runtime,
            batches=feed,
            step_at=(lambda _, state: (step_fn, state)) if step_fn is not None else step_for(config, parts),
            evaluate=_evaluation(parts, data, run.watchdog.beat),
            save=build_save(config, runtime, tracker, {"data": data.fingerprint, "jumps": jumps}, feed, saver),
            check=build_health_check(runtime, config.distributed.health_check_interval),
            before_step=stack.enter_context(profile_window(config.profiling, run.run_dir / "profile")),
            beat=run.watchdog.beat,
            tracker=tracker,
            hooks=run.hooks,
            progress=progress,
        )
        stack.push(run.mark)
        state = run_loop(state, loop, interruption)
        if int(state.step) == steps:
            _farewell(config, parts, data, state, progress)
    return state


def _roll_back(run: _Run, failure: TooManySkips, notes: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
    """The state of the newest sound checkpoint before the skipped updates, and notes that jump over the data since.

    Raises:
        TooManySkips: `train.max_rollbacks` were made.
        RunError: there is no such checkpoint.
    """
    root, jumps = run.run_dir / "checkpoints", notes.get("jumps", [])
    if len(jumps) >= run.config.train.max_rollbacks:
        raise failure
    saved = latest_sound(root, before=failure.first)
    if saved is None:
        raise RunError(f"{root}: no sound checkpoint is older than update {failure.first}; {failure}")
    state, notes = starting_state(run.config, run.parts, run.data, saved)
    jumps = jump_over(jumps, failed=failure.made, back_to=checkpoint_step(saved))
    if run.parts.runtime.leads:
        log.warning("%s: going back to %s and jumping over %d batches", failure.what, saved.name, jumps[-1][1])
        remove_newer(root, checkpoint_step(saved))
    return state, {**notes, "jumps": jumps}


def _save_config(config: JobConfig, path: Path) -> None:
    try:
        save_config(config, path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir") from None


def _find_checkpoint(config: JobConfig, run_dir: Path, runtime: Runtime) -> Path | None:
    """The newest sound checkpoint of the run folder, if it fits the config."""
    root = run_dir / "checkpoints"
    if runtime.leads:
        if root.exists() and not (root.is_dir() and os.access(root, os.W_OK)):
            raise RunError(f"{root}: no checkpoint can be written there: make it a folder, or take another --run-dir")
        remove_leftovers(root)
    saved = latest_sound(root)
    if saved is None:
        if list_checkpoints(root):
            raise CheckpointError(
                f"{root}: every checkpoint is damaged: choose another --run-dir, or remove the folder"
            )
        return None
    manifest, before = read_manifest(saved), load_config(saved / "config.toml")
    only = has_parameters_only(manifest)
    check_resumable(before, config, saved, manifest["step"], parameters_only=only)
    if runtime.leads and not only:
        _warn_of_jump(before, config, manifest["step"])
    return saved


def _warn_of_jump(before: JobConfig, config: JobConfig, step: int) -> None:
    """Say so where another number of steps, of which warmup and decay are shares, moves the learning rate at once."""
    steps, planned = config.train.steps, before.train.steps
    old = learning_rate(evolve(config, train=evolve(config.train, steps=planned)), step)
    new = learning_rate(config, step)
    if step < steps and not math.isclose(old, new, rel_tol=1e-3):
        log.warning(
            "the learning rate goes on at %.3g, not at %.3g: its schedule spans train.steps,"
            " which was %d and is %d now",
            new, old, planned, steps,
        )  # fmt: skip


def starting_state(
    config: JobConfig, parts: Parts, data: DataPipeline, saved: Path | None
) -> tuple[TrainState, dict[str, Any]]:
    """The state to train from, and the notes beside it."""
    if saved is None:
        return initial_state(config, parts), {}
    manifest = read_manifest(saved)
    if manifest["notes"].get("data", data.fingerprint) != data.fingerprint:
        raise CheckpointError(
            f"{saved} was trained on other tokens than {config.data.path} holds now: give the same data, or another"
            " --run-dir"
        )
    return restore(saved, config, parts), manifest["notes"]


def _tracker(config: JobConfig, runtime: Runtime, run_dir: Path, done: int, notes: dict[str, Any]) -> MetricsTracker:
    total, weight = notes.get("loss_ema", (0.0, 0.0))
    tracker = MetricsTracker(config, runtime.world_size, device=runtime.device, ema_state=(total, weight))
    try:
        tracker.init_backends(config, resume_step=done)
    except OSError as error:
        raise RunError(f"{run_dir}: metrics cannot be written ({error.strerror})") from None
    return tracker


def _evaluation(
    parts: Parts, data: DataPipeline, beat: Callable[[str], None]
) -> Callable[[TrainState], dict[str, float]] | None:
    if not data.eval_sets:
        return None

    def evaluate(state: TrainState) -> dict[str, float]:
        params = params_to_use(parts.optimizer, state)
        runtime = parts.runtime

        def place(batch: Batch) -> Batch:
            beat("in the evaluation")
            return share_of(batch, runtime.data_rank, runtime.data_ranks).to(runtime.device)

        return run_eval_sets(parts.eval_step, params, state.extras, data.eval_sets, place=place)

    return evaluate


def _announce(config: JobConfig, parts: Parts, data: DataPipeline, done: int, progress: Progress) -> None:
    train = config.train
    size = count_parameters(config.model).total / 1e6
    epochs = f" ({train.steps * train.global_batch_size / data.samples:.2f} epochs)" if data.samples else ""
    progress.note(
        f"{f'resuming at step {done}' if done else 'starting'}: {size:.2f} M parameters, {config.optimizer.name},"
        f" {train.steps} steps of {train.global_batch_size} x {train.seq_len} tokens{epochs}"
        f" on {parts.runtime.device}"
    )


def _farewell(config: JobConfig, parts: Parts, data: DataPipeline, state: TrainState, progress: Progress) -> None:
    """A sample of what the model writes, and how to go on."""
    if config.eval.sample_tokens:
        params = params_to_use(parts.optimizer, state)
        asked = Sampling(temperature=config.eval.sample_temperature)
        (sample,) = sample_texts(
            config, parts, params, state.extras, data.tokenizer, [config.eval.sample_prompt], asked,
            max_new_tokens=config.eval.sample_tokens,
        )  # fmt: skip
        text = sample.text
        progress.note("a sample:\n" + "\n".join("    " + line for line in text.splitlines()))
        if parts.runtime.leads:
            record_sample(Path(config.run_dir) / "samples.jsonl", int(state.step), text)
    run_dir, prompt = config.run_dir, config.eval.sample_prompt
    progress.note(
        f"done: {run_dir}; look: tensorboard --logdir {run_dir}/tensorboard; go on: add --train.steps"
        f" {2 * config.train.steps}; generate: python cli.py generate --run-dir {run_dir} --prompt '{prompt}'"
    )
