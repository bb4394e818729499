"""What a run shows while it works: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TextIO

from attrs import frozen

from forge.metrics import format_metrics, wants_color


@frozen
class Progress:
    """Where a run writes to."""

    advance: Callable[[int, Mapping[str, float | str]], None]
    """(updates made, newest metrics): move the bar; a log line where there is no bar."""
    note: Callable[[str], None]
    """One line of text that stays."""


@contextmanager
def training_progress(steps: int, done: int, stream: TextIO | None = None) -> Generator[Progress, None, None]:
    """Show the progress of a run of `steps` updates of which `done` are made.

    On a terminal the bar holds the newest numbers and the time left; elsewhere every set of metrics is a line.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        yield _plain(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(file=stream, highlight=False)
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(compact=True),
    )
    color = wants_color(stream)
    with Bar(*columns, console=console, transient=False) as bar:
        task = bar.add_task("train", total=steps, completed=done, numbers="")

        def advance(step: int, metrics: Mapping[str, float | str]) -> None:
            if metrics:
                bar.update(task, completed=step, numbers=_numbers(metrics))
            else:
                bar.update(task, completed=step)

        def note(line: str) -> None:
            console.print(line, markup=False, style=None if color else "none")

        yield Progress(advance, note)


def _plain(stream: TextIO) -> Progress:
    def write(line: str) -> None:
        print(line, file=stream, flush=True)

    def advance(step: int, metrics: Mapping[str, float | str]) -> None:
        if metrics:
            write(format_metrics(step, metrics))

    return Progress(advance, write)


def _numbers(metrics: Mapping[str, float | str]) -> str:
    """The log line without its step, which the bar shows itself."""
    return format_metrics(0, metrics).partition("] ")[2]


@contextmanager
def counting_progress(label: str, stream: TextIO | None = None) -> Generator[Callable[[int, int], None], None, None]:
    """Yield `report(done, total)`: a bar on a terminal, a line at every tenth elsewhere."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(file=stream)) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth > shown:
            shown = tenth
            print(f"{label}: {done} of {total}", file=stream, flush=True)

    yield report
