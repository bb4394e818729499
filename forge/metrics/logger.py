"""A log line out of a dict of metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Protocol

from forge.logging import get_logger

__all__ = ["format_metrics", "get_logger", "wants_color"]

_FRACTIONS = {"mfu", "mem_utilization"}
_BOLD, _DIM, _RESET = "\033[1m", "\033[2m", "\033[0m"


class _Terminal(Protocol):
    def isatty(self) -> bool: ...


def format_metrics(step: int, metrics: Mapping[str, float | int | bool | str], *, color: bool = False) -> str:
    """`[step 1000] loss=2.34 | lr=3.00e-04 | grad_norm=1.2 | tok/s=125k | mfu=52.3% | mem=71.2/80GB`.

    Text and truth values stand as they are; a learning rate is in scientific notation; `mfu` and `mem_utilization` are
    fractions shown in per cent; other numbers have up to four significant digits, and three with a unit (k, M, B, T)
    from 10,000 on. What a key is follows from its last part: `train/lr` is a learning rate.
    """
    bold, dim, reset = (_BOLD, _DIM, _RESET) if color else ("", "", "")
    parts = (f"{dim}{key}={reset}{_value(key.rpartition('/')[2], value)}" for key, value in metrics.items())
    return f"{bold}[step {step}]{reset} " + f"{dim} | {reset}".join(parts)


def wants_color(stream: _Terminal) -> bool:
    """Whether the stream is a terminal that shows colours, and NO_COLOR (no-color.org) is not set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def _value(name: str, value: float | int | bool | str) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    if not math.isfinite(value):
        return str(float(value))
    if name == "lr":
        return f"{value:.2e}"
    return f"{value:.1%}" if name in _FRACTIONS else _number(float(value))


def _number(value: float) -> str:
    if abs(value) < 9999.5:  # what four digits round to less than 10,000
        return f"{value:.4g}"
    for unit in "kMBT":
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value * 1e12:.3g}"
