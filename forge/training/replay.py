"""Make a step of a run again and compare it with what the run recorded, to the last bit.

A step that comes out the same is reproducible. One that does not was made with other software or on another machine
(which is said), by kernels that are not deterministic (`train.deterministic`), or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from attrs import define, frozen

from forge.checkpoint import checkpoint_path, checkpoint_step, latest_sound, list_checkpoints, verify_checkpoint
from forge.checkpoint.load import read_layout, read_parts
from forge.config import config_from_dict, config_to_dict, load_config
from forge.data import Position
from forge.distributed.shards import local_data
from forge.errors import CheckpointError, RunError
from forge.files import step_lines
from forge.pytree import same_bits, tree_flatten_named
from forge.resilience import batch_index
from forge.training.data_pipeline import open_data, open_feed
from forge.training.entry import starting_state
from forge.training.parts import adopt, build_parts, step_for
from forge.training.provenance import governing, hardware, read_starts, software
from forge.training.runtime import Runtime, deterministic_kernels, open_runtime
from forge.training.state import StepResult, TrainState

COMPARED = ("loss", "grad_norm", "lr")
"""Of every update that was logged."""


@frozen
class _Record:
    """What a run folder tells of its updates."""

    run_dir: Path
    starts: list[dict[str, Any]]  # lines of provenance.jsonl
    logged: dict[int, dict[str, float]]  # by number of the update

    @property
    def root(self) -> Path:
        return self.run_dir / "checkpoints"

    def stretches(self, done: int, step: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The updates after `done`, up to `step`, by the start of the run that made them: config and data of each."""
        for _, group in groupby(range(done + 1, step + 1), key=lambda number: id(governing(self.starts, number))):
            numbers = list(group)
            yield governing(self.starts, numbers[0]), numbers


@define
class _Verdict:
    """Whether all was equal so far, and a line for each thing compared."""

    report: Callable[[str], None]
    equal: bool = True

    def note(self, what: str, equal: bool, detail: str = "") -> None:
        self.equal = self.equal and equal
        self.report(f"{what}: {'equal' if equal else 'DIFFERENT' + detail}")


def replay_step(run_dir: str | Path, step: int = -1, *, report: Callable[[str], None] = print) -> bool:
    """Make the updates from the nearest sound checkpoint before `step` to it again, and compare.

    Compared are loss, gradient norm and learning rate of every logged update on the way and, where there is a
    checkpoint of `step`, all that it holds. The run folder is left as it is. A run of several processes is replayed by
    as many, under torchrun.

    Args:
        step: number of the update; -1 = that of the newest checkpoint.
        report: takes a line for each thing compared, on rank 0.

    Returns:
        Whether everything was equal; on every rank.

    Raises:
        RunError: nothing of the step was recorded, or the run was made by another number of processes.
        CheckpointError: there is no run, a checkpoint is damaged, or the data are others now.
    """
    record = _read_record(Path(run_dir))
    step = _recorded_step(record, step)
    config = config_from_dict(governing(record.starts, step)["config"])
    with open_runtime(config) as runtime, deterministic_kernels(config.train.deterministic):
        verdict = _Verdict(report if runtime.leads else lambda line: None)
        saved = latest_sound(record.root, before=step)
        done = 0 if saved is None else checkpoint_step(saved)
        verdict.report(f"{run_dir}: steps {done + 1} to {step} from {saved.name if saved else 'the initial weights'}")
        for start, _ in record.stretches(done, step):
            _compare_machines(start, runtime, verdict.report)
        state = _make_again(record, saved, range(done, step), runtime, verdict)
        target = checkpoint_path(record.root, step)
        if target.is_dir():
            _compare_state(target, state, runtime, verdict)
        return not runtime.any_rank(not verdict.equal)


def _read_record(run_dir: Path) -> _Record:
    if not (run_dir / "config.toml").exists():
        raise CheckpointError(f"{run_dir}: no run here: give another --run-dir")
    logged: dict[int, dict[str, float]] = {}
    metrics = run_dir / "metrics.jsonl"
    for step, line in step_lines(metrics) if metrics.exists() else ():
        if "train/loss" in line:
            logged[step] = {name: float(line[f"train/{name}"]) for name in COMPARED}
    before_records = {"step": 0, "jumps": [], "config": config_to_dict(load_config(run_dir / "config.toml"))}
    return _Record(run_dir, read_starts(run_dir) or [before_records], logged)


def _recorded_step(record: _Record, step: int) -> int:
    """The step to compare; refused where nothing of it was recorded."""
    saved = [checkpoint_step(path) for path in list_checkpoints(record.root)]
    if step < 0 and not saved:
        raise CheckpointError(f"{record.root}: no checkpoint here: name a logged step with --step")
    step = saved[-1] if step < 0 else step
    known = {*record.logged, *saved} - {0}
    if step not in known:
        nearest = min(known, key=lambda other: abs(other - step), default=None)
        hint = "" if nearest is None else f"; the nearest step that was is {nearest}"
        raise RunError(f"{record.run_dir}: step {step} was neither logged nor saved: nothing to compare{hint}")
    return step


def _compare_machines(start: dict[str, Any], runtime: Runtime, report: Callable[[str], None]) -> None:
    """Say where software or hardware are not those of the run; another number of processes is refused."""
    here = {**software(), **hardware(runtime)}
    processes = start.get("world_size", runtime.world_size)
    if processes != runtime.world_size:
        raise RunError(
            f"steps after {start['step']} were made by {processes} processes, and {runtime.world_size} round otherwise:"
            f" torchrun --nproc-per-node {processes} cli.py replay"
        )
    for name, value in here.items():
        if start.get(name, value) != value:
            report(f"note: {name} was {start[name]}, is {value}")


def _make_again(record: _Record, saved: Path | None, updates: range, runtime: Runtime, verdict: _Verdict) -> TrainState:
    """The state after the updates (from 0), whose logged results are compared on the way."""
    state: TrainState | None = None
    position: Position | None = None
    for start, numbers in record.stretches(updates.start, updates.stop):
        config = config_from_dict(start["config"])
        parts, data = build_parts(config, runtime), open_data(config, runtime)
        if state is None:
            state, notes = starting_state(config, parts, data, saved)
            position = notes.get("stream")
        else:
            state = adopt(parts, state)
        step_at = step_for(config, parts)
        feed = open_feed(
            data,
            config.data,
            numbers[0] - 1,
            numbers[-1],
            position=position,
            index_at=partial(batch_index, start["jumps"]),
        )
        with closing(feed):
            for number, batch in zip(numbers, feed, strict=True):
                train_step, state = step_at(number - 1, state)
                state, result = train_step(state, batch.to(runtime.device))
                _compare_result(number, record.logged.get(number, {}), result, verdict)
        position = feed.position
    assert state is not None
    return state


def _compare_result(number: int, logged: dict[str, float], result: StepResult, verdict: _Verdict) -> None:
    for name, then in logged.items():
        now = float(getattr(result, name))
        equal = now == then or (math.isnan(now) and math.isnan(then))
        verdict.note(f"step {number}: {name} {then!r}", equal, f", now {now!r}")


def _compare_state(target: Path, state: TrainState, runtime: Runtime, verdict: _Verdict) -> None:
    """Compare each rank's part of every tensor with what the checkpoint holds."""
    verify_checkpoint(target)
    layout, leaves, different = read_layout(target), tree_flatten_named(state), 0
    for name, leaf in leaves.items():
        now = local_data(leaf)
        then = local_data(read_parts(target, layout, {name: leaf}, runtime.device)[name])
        if not same_bits(then, now):
            different += 1
            most = float((now.double() - then.double()).abs().max())
            verdict.note(f"{target.name}: {name}", False, f" by up to {most:.4g}")
    if not different:
        verdict.note(f"{target.name}: all {len(leaves)} tensors", True)
