"""The page: tables that need no script, and the points that the script draws."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import frozen

from forge.errors import RunError
from forge.files import replace_file
from forge.report.curve import Curve, Point
from forge.report.read import WrittenRun

MOST_BUCKETS = 70_000
"""Of all curves together, two points each at about 20 bytes: a page of at most 3 MB."""

MAIN = {
    "train/loss": "Training loss",
    "eval/loss": "Held-out loss",
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm before clipping",
    "train/tokens_per_sec": "Tokens a second",
    "train/mfu": "MFU",
    "memory/peak_gb": "Peak memory, GiB",
    "train/loss by source": "Training loss by source",
    "eval/loss by set": "Held-out loss by set",
}
"""The charts that come first, in this order; all others follow by name."""


@frozen
class Line:
    """A curve in a chart."""

    run: int
    label: str  # within the run, where a chart has several of one
    curve: Curve
    not_finite: int


def write_report(runs: Sequence[WrittenRun], path: Path) -> None:
    """Write the page; it loads nothing, and what runs are named or have written is text in it, never markup.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, render(runs).encode(errors="replace"))
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}; choose another --out") from None


def render(runs: Sequence[WrittenRun]) -> str:
    """The page as text; makes the curves of the runs coarser where there are too many points for a page."""
    charts = _charts(runs)
    total = sum(len(lines) for lines in charts.values())
    for lines in charts.values():
        for line in lines:
            line.curve.shrink(max(16, MOST_BUCKETS // max(1, total)))
    data = {"runs": [run.name for run in runs], "charts": [_data(lines) for lines in charts.values()]}
    script = _asset("page.js")
    parts = {
        "{{script-hash}}": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "{{title}}": escape("forge: " + ", ".join(run.name for run in runs)),
        "{{style}}": _asset("page.css"),
        "{{runs}}": "".join(_run_switch(number, run) for number, run in enumerate(runs)),
        "{{main}}": "".join(_figures(runs, charts, main=True)),
        "{{others}}": "".join(_figures(runs, charts, main=False)),
        "{{config}}": _config(runs),
        "{{samples}}": "".join(_samples(run) for run in runs) or "<p>None of the runs has written one.</p>",
        "{{data}}": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "{{script}}": script,
    }
    return "".join(parts.get(piece, piece) for piece in _pieces(_asset("page.html")))


def _pieces(template: str) -> Iterator[str]:
    """The template cut at its `{{names}}`: a value that looks like one is not filled in again."""
    for text in template.split("{{"):
        name, closed, rest = text.partition("}}")
        yield from ("{{" + name + "}}", rest) if closed else (text,)


def _asset(name: str) -> str:
    return files("forge.report").joinpath(name).read_text(encoding="utf-8")


def _charts(runs: Sequence[WrittenRun]) -> dict[str, list[Line]]:
    """Name of a chart -> its lines; `train/loss/web` and `eval/web/loss` are lines of a chart over all sources."""
    charts: dict[str, list[Line]] = {}
    for number, run in enumerate(runs):
        for key, curve in run.curves.items():
            name, label = _place(key)
            charts.setdefault(name, []).append(Line(number, label, curve, run.not_finite.get(key, 0)))
    order = {name: at for at, name in enumerate(MAIN)}
    return {name: charts[name] for name in sorted(charts, key=lambda name: (order.get(name, len(order)), name))}


def _place(key: str) -> tuple[str, str]:
    group, _, rest = key.partition("/")
    first, _, second = rest.partition("/")
    if not second:
        return key, ""
    if group == "eval":
        inner, _, last = rest.rpartition("/")
        return f"eval/{last} by set", inner
    return f"{group}/{first} by source", second


def _data(lines: Sequence[Line]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        points = line.curve.points()
        values = [float(f"{value:.6g}") for _, value in points]
        found.append({"run": line.run, "label": line.label, "steps": [step for step, _ in points], "values": values})
    return found


def _run_switch(number: int, run: WrittenRun) -> str:
    return (
        f'<label class="run"><input type="checkbox" checked data-run="{number}">'
        f'<span class="swatch c{number % 8}"></span>{escape(run.name)}</label>'
    )


def _figures(runs: Sequence[WrittenRun], charts: dict[str, list[Line]], *, main: bool) -> Iterator[str]:
    for number, (name, lines) in enumerate(charts.items()):
        if (name in MAIN) == main:
            yield _figure(runs, number, name, lines)


def _figure(runs: Sequence[WrittenRun], number: int, name: str, lines: Sequence[Line]) -> str:
    title = escape(MAIN.get(name, name))
    head = ["curve", "first", "last", "least", "largest", "values", "not finite"]
    rows = [
        [
            f"{runs[line.run].name} {line.label}".strip(),
            *(_shown(point) for point in (line.curve.first, line.curve.last, line.curve.least, line.curve.largest)),
            str(line.curve.count),
            str(line.not_finite),
        ]
        for line in lines
    ]
    key = f" <code>{escape(name)}</code>" if name in MAIN else ""
    return (
        f'<figure data-chart="{number}"><figcaption><h3>{title}</h3>{key}</figcaption><div class="plot"></div>'
        f"<details><summary>Numbers</summary>{_table(head, rows)}</details></figure>"
    )


def _shown(point: Point | None) -> str:
    return "none" if point is None else f"{point[0]:.6g} at {point[1]}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are text; the first of a row heads it."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = []
    for first, *cells in rows:
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr><th scope="row">{escape(first)}</th>{columns}</tr>')
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _config(runs: Sequence[WrittenRun]) -> str:
    """Of several runs the keys that differ; of one run all keys."""
    keys = sorted({key for run in runs for key in run.config})
    if len(runs) > 1:
        keys = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    rows = [[key, *(run.config.get(key, "not set") for run in runs)] for key in keys]
    table = _table(["key", *(run.name for run in runs)], rows)
    if len(runs) > 1:
        return f"<p>{len(keys)} keys differ.</p>{table}"
    return f"<details><summary>All {len(keys)} keys</summary>{table}</details>"


def _samples(run: WrittenRun) -> str:
    return "".join(
        f"<h3>{escape(run.name)}, step {sample.step}</h3><pre>{escape(sample.text)}</pre>" for sample in run.samples
    )
