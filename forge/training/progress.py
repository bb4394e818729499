"""What a run shows while it works: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TextIO

from attrs import frozen

from forge.metrics import format_metrics


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

    A terminal has a bar with the time left, and the newest numbers below it; elsewhere every set of metrics is a line.
    """
    stream = sys.stdout if stream is None else stream
    if not _can_redraw(stream):
        yield _plain(stream)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    elapsed, eta = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
    bar = Bar(BarColumn(bar_width=24), MofNCompleteColumn(), elapsed, TextColumn("eta"), eta, console=console)
    task, numbers = bar.add_task("train", total=steps, completed=done), Text()

    def advance(step: int, metrics: Mapping[str, float | str]) -> None:
        bar.update(task, completed=step)
        if metrics:
            numbers.plain = _numbers(metrics)

    def note(line: str) -> None:
        console.print(visible(line), markup=False, emoji=False, soft_wrap=True)

    with Live(Group(bar, numbers), console=console):
        yield Progress(advance, note)


def visible(text: str) -> str:
    """The text without what would command a terminal: a model may write any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def _can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


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
    if _can_redraw(stream):
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
            print(f"{label}: {100 * done // max(total, 1)} %", file=stream, flush=True)

    yield report


SILENT = Progress(lambda step, metrics: None, lambda line: None)
"""For the ranks that do not write."""
