"""Where the time of a step goes, from a trace of torch.profiler: one kind of work for each moment of the window."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from forge.errors import RunError
from forge.files import parse_json

STEP, DATA, LOSS, OPTIMIZER = "forge.step", "forge.data", "forge.loss", "forge.optimizer"
"""Ranges that forge marks in a trace: a step, the wait for its batch, the head and loss, the update."""

KINDS = ("matmul", "attention", "loss", "optimizer", "other", "communication", "data", "idle")
"""Of two that run on a device at once the earlier counts: communication behind a matrix product costs nothing."""

_RANGES = {DATA: "data", LOSS: "loss", OPTIMIZER: "optimizer"}
_NAMES = {
    "communication": re.compile(r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE),
    "attention": re.compile(r"attention|flash|fmha|sdpa|scaled_?dot_?product", re.IGNORECASE),
    "matmul": re.compile(
        r"^aten::(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|linear|matmul|einsum|_scaled_mm|_grouped_mm)(_out)?$"
        r"|gemm|gemv|cutlass|cublas|nvjet"
    ),
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def span(name: str) -> AbstractContextManager[Any]:
    """A range in the trace of a profiler that is running; nothing at all without one."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


@frozen
class Timeline:
    """Time by kind, in microseconds; the kinds of the host, and those of the device, sum to `wall`."""

    steps: int
    wall: float
    host: Mapping[str, float]  # of the thread that takes the steps; idle = Python between operators, and waiting
    device: Mapping[str, float] | None  # None: nothing ran on one
    operators: Mapping[str, float]  # the own time of the device's kernels, or of the host's operators


@frozen(eq=False)
class _Op:
    """An operator, range or kernel; each is its own key."""

    name: str
    start: float
    end: float
    is_range: bool
    id: int | None  # of the operator, which its kernels carry too
    sequence: int | None  # of the autograd node that it makes, or runs
    backward: bool


def read_timeline(path: Path) -> Timeline:
    """The time by kind of a trace that `forge.training.profiling` has written.

    Raises:
        RunError: the file cannot be read, or has no step of forge in it.
    """
    try:
        trace = parse_json(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        return timeline(trace["traceEvents"])
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: no trace of a forge run: {error}") from None


def timeline(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Time by kind of the events of a Chrome trace.

    A moment of the host belongs to the outermost operator or range that has a kind, but communication is always its
    own; a backward operator belongs to the loss where its forward one did. A kernel is of the kind of the operator
    that launched it, else of its name. A device that has nothing to do while the host waits for data waits for data.

    Raises:
        ValueError: no step is marked.
    """
    threads: dict[Any, list[_Op]] = defaultdict(list)
    kernels: list[_Op] = []
    for event in events:
        kind = event.get("cat")
        if event.get("ph") == "X" and kind in ("cpu_op", "user_annotation"):
            threads[event["pid"], event["tid"]].append(_op(event))
        elif event.get("ph") == "X" and kind in _ON_DEVICE:
            kernels.append(_op(event))
    main = [ops for ops in threads.values() if any(op.name == STEP for op in ops)]
    if not main:
        raise ValueError(f"no {STEP} range")
    steps = [op for op in main[0] if op.name == STEP]
    window = min(op.start for op in steps), max(op.end for op in steps)
    in_loss = _loss_nodes(threads.values())
    kinds = {op: kind for ops in threads.values() for op, kind in _kinds(ops, in_loss).items()}
    host, operators = _host_time(main[0], kinds, window)
    device = None
    if kernels:
        by_id = {op.id: kind for op, kind in kinds.items() if op.id is not None}
        busy = [(op.start, op.end, by_id.get(op.id or -1) or _named(op.name) or "other") for op in kernels]
        device = _device_time(busy + [(op.start, op.end, "data") for op in main[0] if op.name == DATA], window)
        operators = defaultdict(float)
        for op in kernels:
            operators[op.name] += op.end - op.start
    return Timeline(len(steps), window[1] - window[0], host, device, operators)


def _op(event: Mapping[str, Any]) -> _Op:
    args = event.get("args", {})
    return _Op(
        name=event["name"],
        start=float(event["ts"]),
        end=float(event["ts"]) + float(event.get("dur", 0)),
        is_range=event["cat"] == "user_annotation",
        id=args.get("External id"),
        sequence=args.get("Sequence number"),
        backward=bool(args.get("Fwd thread id")),
    )


def _named(name: str) -> str | None:
    return next((kind for kind, pattern in _NAMES.items() if pattern.search(name)), None)


def _nested(ops: Iterable[_Op]) -> Iterable[tuple[_Op, _Op | None]]:
    """(operator, the one around it) of one thread, in the order of their starts."""
    around: list[_Op] = []
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        while around and around[-1].end <= op.start:
            around.pop()
        yield op, around[-1] if around else None
        around.append(op)


def _loss_nodes(threads: Iterable[Sequence[_Op]]) -> set[int]:
    """Sequence numbers of the autograd nodes made within the loss."""
    made: dict[int, bool] = {}  # an operator that makes no node has the number of the next one: the last counts
    for ops in threads:
        within: dict[_Op | None, bool] = {None: False}
        for op, parent in _nested(ops):
            within[op] = op.name == LOSS or within[parent]
            if op.sequence is not None and not op.backward:
                made[op.sequence] = within[op]
    return {sequence for sequence, inside in made.items() if inside}


def _kinds(ops: Iterable[_Op], in_loss: set[int]) -> dict[_Op, str | None]:
    """The kind of each operator of a thread; None = other."""
    kinds: dict[_Op | None, str | None] = {None: None}
    for op, parent in _nested(ops):
        own = _RANGES.get(op.name) if op.is_range else _named(op.name)
        if op.backward and op.sequence in in_loss:
            own = "loss"
        kinds[op] = own if own == "communication" else kinds[parent] or own
    return {op: kind for op, kind in kinds.items() if op is not None}


def _host_time(
    ops: Iterable[_Op], kinds: Mapping[_Op, str | None], window: tuple[float, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Own time by kind and by operator. A range is no work, but for the wait for data."""
    times, (low, high) = dict.fromkeys(KINDS, 0.0), window
    operators: dict[str, float] = defaultdict(float)
    for op, parent in _nested(ops):
        seconds = max(0.0, min(op.end, high) - max(op.start, low))
        for holder, sign in ((op, 1), (parent, -1)):
            if holder is None or (holder.is_range and holder.name != DATA):
                continue
            times[kinds[holder] or "other"] += sign * seconds
            if not holder.is_range:
                operators[holder.name] += sign * seconds
    times["idle"] = max(0.0, high - low - sum(times.values()))
    return times, operators


def _device_time(busy: Iterable[tuple[float, float, str]], window: tuple[float, float]) -> dict[str, float]:
    """The window by the kind that runs; of several at once the first of `KINDS`."""
    times, (low, high) = dict.fromkeys(KINDS, 0.0), window
    changes = [(time, kind, sign) for start, end, kind in busy for time, sign in ((start, 1), (end, -1))]
    running, before = Counter[str](), low
    for time, kind, sign in [*sorted(changes), (high, "idle", 0)]:
        now = min(max(time, low), high)
        times[next((kind for kind in KINDS if running[kind] > 0), "idle")] += now - before
        before = now
        running[kind] += sign
    return times


def format_timeline(found: Timeline, rows: int = 10) -> str:
    """A table of the kinds, and the operators that take most time."""
    sides = {"host": found.host} | ({"device": found.device} if found.device is not None else {})
    lines = [f"time by kind, mean of {found.steps} steps of {found.wall / found.steps / 1000:.3f} ms"]
    lines.append(f"{'kind':<14}" + "".join(f"{side + ', ms':>12}{'share':>9}" for side in sides))
    for kind in (*KINDS, "all"):
        times = [sum(side.values()) if kind == "all" else side[kind] for side in sides.values()]
        cells = (f"{time / found.steps / 1000:>12.3f}{time / found.wall:>9.1%}" for time in times)
        lines.append(f"{kind:<14}" + "".join(cells))
    what = "kernels" if found.device is not None else "operators"
    lines += ["", f"{what} with the most time of their own, ms a step"]
    most = sorted(found.operators.items(), key=lambda item: -item[1])[:rows]
    lines += [f"{time / found.steps / 1000:>12.3f}  {name[:90]}" for name, time in most]
    return "\n".join(lines)
