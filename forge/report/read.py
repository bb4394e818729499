"""What a run folder says of its run: config, metrics, samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from forge.config.toml import parse_toml
from forge.errors import ConfigError, RunError
from forge.files import step_lines
from forge.report.curve import Curve


@frozen
class Sample:
    """Text that the model wrote after `step` updates."""

    step: int
    text: str


@frozen
class WrittenRun:
    """A run as its folder tells it."""

    name: str
    config: dict[str, str]  # section.key -> value as text
    curves: dict[str, Curve]  # by key of metrics.jsonl
    not_finite: dict[str, int]  # by the same keys: values that are nan or infinite, and not in the curve
    samples: tuple[Sample, ...]  # by step


def read_run(folder: Path) -> WrittenRun:
    """Read a run folder, of a run that may still be going on: a line that is half written is left out.

    Raises:
        RunError: there are no metrics, or a file cannot be read.
    """
    try:
        curves, not_finite = _curves(folder / "metrics.jsonl")
        return WrittenRun(
            name=str(folder),
            config=_config(folder / "config.toml"),
            curves=curves,
            not_finite=not_finite,
            samples=_samples(folder / "samples.jsonl"),
        )
    except FileNotFoundError:
        raise RunError(f"{folder}: no metrics.jsonl here; a run folder has one unless metrics.jsonl = false") from None
    except OSError as error:
        raise RunError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None


def _curves(path: Path) -> tuple[dict[str, Curve], dict[str, int]]:
    curves: dict[str, Curve] = {}
    not_finite: dict[str, int] = {}
    for step, line in step_lines(path):
        for key, value in line.items():
            number = _number(value)
            if key == "step" or number is None:
                continue
            curve = curves.get(key) or curves.setdefault(key, Curve())
            if math.isfinite(number):
                curve.add(step, number)
            else:
                not_finite[key] = not_finite.get(key, 0) + 1
    return curves, not_finite


def _number(value: Any) -> float | None:
    """A number, or one of the texts that `forge.metrics.sinks` writes where JSON has no number."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # an integer beyond every float
        return None


def _samples(path: Path) -> tuple[Sample, ...]:
    if not path.exists():
        return ()
    found = {step: str(line.get("text", "")) for step, line in step_lines(path)}
    return tuple(Sample(step, found[step]) for step in sorted(found))


def _config(path: Path) -> dict[str, str]:
    """`section.key -> value`; read as it stands, since another version of forge may have written it."""
    try:
        return dict(_flat(parse_toml(path))) if path.exists() else {}
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from None


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
