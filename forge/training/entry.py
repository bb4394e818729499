"""`run_training(config)`: build every part of a run, train, save, tear down."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from forge.checkpoint import (
    AsyncSaver,
    check_resumable,
    latest_sound,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    read_manifest,
    remove_leftovers,
    save_checkpoint,
)
from forge.config import JobConfig, load_config, save_config
from forge.data import Batch, Stream, share_of
from forge.errors import CheckpointError, RunError, Stopped
from forge.metrics import MetricsTracker, count_parameters
from forge.resilience import catch_signals, lock_run
from forge.training.data_pipeline import DataPipeline, Feed, build_data_pipeline, open_feed, prepare_data
from forge.training.eval import run_eval_sets
from forge.training.hooks import Hook, HookRunner
from forge.training.loop import Loop, run_loop
from forge.training.optimizer import eval_params
from forge.training.parts import Parts, adopt, build_parts, initial_state, step_for, template_state, whole_params
from forge.training.profiling import profile_window
from forge.training.progress import SILENT, Progress, counting_progress, training_progress
from forge.training.runtime import Runtime, deterministic_kernels, open_runtime
from forge.training.samples import sample_text
from forge.training.state import TrainState
from forge.training.step import TrainStep


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
        if runtime.leads:
            stack.enter_context(lock_run(run_dir))
        stack.enter_context(deterministic_kernels(config.train.deterministic))
        saved = _find_checkpoint(config, run_dir, runtime)
        pipeline = _data(config, runtime, data)
        parts = build_parts(config, runtime)
        state, notes = _start(config, parts, pipeline, saved)
        done = int(state.step)
        if done >= config.train.steps:
            if runtime.leads:
                print(f"{run_dir}: this run has finished all its {done} steps; --train.steps {2 * done} would go on.")
            return state
        if runtime.leads:
            save_config(config, run_dir / "config.toml")
        tracker = _tracker(config, runtime, run_dir, done, notes)
        stack.callback(tracker.close)
        progress = stack.enter_context(training_progress(config.train.steps, done)) if runtime.leads else SILENT
        _announce(config, parts, pipeline, done, progress)
        where, pin = notes.get("stream"), runtime.device.type == "cuda"
        feed = open_feed(pipeline, config.data, done, config.train.steps, position=where, pin=pin)
        stack.enter_context(closing(feed))
        saver = stack.enter_context(closing(AsyncSaver())) if config.checkpoint.async_save else None
        loop = Loop(
            config=config,
            runtime=runtime,
            batches=feed,
            step_at=(lambda _, state: (step_fn, state)) if step_fn is not None else step_for(config, parts),
            evaluate=_evaluation(parts, pipeline),
            save=_saving(config, runtime, run_dir, tracker, pipeline, feed, saver),
            before_step=stack.enter_context(profile_window(config.profiling, run_dir / "profile")),
            tracker=tracker,
            hooks=runner,
            progress=progress,
        )
        runner.on_train_begin(config, done)
        with catch_signals() as interruption:
            state = run_loop(state, loop, interruption)
        step = int(state.step)
        runner.on_train_end(step)
        if step < config.train.steps:
            came = interruption.signal or signal.SIGTERM  # to another rank
            raise Stopped(came, f"saved step {step} in {run_dir}; the same command goes on from there")
        _farewell(config, parts, pipeline, state, progress)
    return state


def _data(config: JobConfig, runtime: Runtime, stream: Stream | None) -> DataPipeline:
    """Open the data; where it must be tokenised first, one rank does it."""
    if runtime.leads:
        with counting_progress("tokenising documents") as report:
            prepare_data(config, streamed=stream is not None, progress=report)
    runtime.barrier()
    return build_data_pipeline(config, stream=stream, rank=runtime.data_rank, ranks=runtime.data_ranks)


def _find_checkpoint(config: JobConfig, run_dir: Path, runtime: Runtime) -> Path | None:
    """The newest sound checkpoint of the run folder, if it fits the config."""
    root = run_dir / "checkpoints"
    if runtime.leads:
        remove_leftovers(root)
    saved = latest_sound(root)
    if saved is None:
        if list_checkpoints(root):
            raise CheckpointError(
                f"{root}: every checkpoint is damaged: choose another --run-dir, or remove the folder"
            )
        return None
    check_resumable(load_config(saved / "config.toml"), config, saved, read_manifest(saved)["step"])
    return saved


def _start(
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
    template = template_state(config, parts, manifest["step"])
    return adopt(parts, load_checkpoint(saved, template, device=parts.runtime.device)), manifest["notes"]


def _tracker(config: JobConfig, runtime: Runtime, run_dir: Path, done: int, notes: dict[str, Any]) -> MetricsTracker:
    total, weight = notes.get("loss_ema", (0.0, 0.0))
    tracker = MetricsTracker(config, runtime.world_size, device=runtime.device, ema_state=(total, weight))
    try:
        tracker.init_backends(config, resume_step=done)
    except OSError as error:
        raise RunError(f"{run_dir}: metrics cannot be written ({error.strerror})") from None
    return tracker


def _evaluation(parts: Parts, data: DataPipeline) -> Callable[[TrainState], dict[str, float]] | None:
    if not data.eval_sets:
        return None

    def evaluate(state: TrainState) -> dict[str, float]:
        params = eval_params(parts.optimizer, state.params, state.opt_state)
        runtime = parts.runtime

        def place(batch: Batch) -> Batch:
            return share_of(batch, runtime.data_rank, runtime.data_ranks).to(runtime.device)

        return run_eval_sets(parts.eval_step, params, state.extras, data.eval_sets, place=place)

    return evaluate


def _saving(
    config: JobConfig,
    runtime: Runtime,
    run_dir: Path,
    tracker: MetricsTracker,
    data: DataPipeline,
    feed: Feed,
    saver: AsyncSaver | None,
) -> Callable[[TrainState, bool], Path]:
    root = run_dir / "checkpoints"

    def notes() -> dict[str, Any]:
        where = {} if feed.position is None else {"stream": feed.position}
        return {"loss_ema": list(tracker.ema_state()), "data": data.fingerprint, **where}

    def prune(_: Path) -> None:
        if runtime.leads:
            prune_checkpoints(root, config.checkpoint.keep_last_n, config.checkpoint.keep_every)

    def save(state: TrainState, final: bool) -> Path:
        if saver is None:
            path = save_checkpoint(root, state, config=config, notes=notes())
            prune(path)
            return path
        path = saver.save(root, state, config=config, notes=notes(), then=prune)
        if final:
            saver.wait()
        return path

    return save


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
        params = whole_params(parts, eval_params(parts.optimizer, state.params, state.opt_state))
        text = sample_text(config, params, state.extras, data.tokenizer)
        progress.note("a sample:\n" + "\n".join("    " + line for line in text.splitlines()))
    run_dir, prompt = config.run_dir, config.eval.sample_prompt
    progress.note(
        f"done: {run_dir}; look: tensorboard --logdir {run_dir}/tensorboard; go on: add --train.steps"
        f" {2 * config.train.steps}; generate: python cli.py generate --run-dir {run_dir} --prompt '{prompt}'"
    )
