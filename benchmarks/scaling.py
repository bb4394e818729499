"""`python -m benchmarks.scaling`: how seconds and memory of an update grow with one size, beside what is calculated."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
from attrs import asdict, evolve, field, frozen

from benchmarks.memory import peak_memory
from benchmarks.peers import forge_runner
from benchmarks.regimes import Regime, job_config
from benchmarks.report import describe_host, draw, markdown_table, writable_folder
from benchmarks.step import alternate
from forge.config.checks import integer
from forge.config.flags import parse
from forge.errors import ForgeError
from forge.metrics import count_flops_per_token
from forge.training.plan import plan_run

BASE = Regime("base", 2048, 128, 2, 4, 128, 8, 1, 3)
AXES: dict[str, tuple[int, ...]] = {
    "dim": (128, 256, 512),
    "n_layers": (2, 4, 8),
    "vocab_size": (2048, 8192, 32768),
    "seq_len": (128, 256, 512),
    "accumulation": (1, 2, 4),
}
"""What is doubled, all else as in BASE; accumulation adds micro-batches of the same size."""


@frozen
class Options:
    """How the cost of forge's update grows, on the CPU."""

    SECTION: ClassVar[str] = ""

    quick: bool = False
    """The two smallest sizes of each axis only."""
    repeats: int = field(default=3, validator=integer(least=1))
    """Turns of each size."""
    out: str = str(Path(__file__).parent / "results")
    """Folder for <host kind>.scaling.md, .json and .png."""


@frozen
class Point:
    """One size: measured and calculated."""

    size: int
    seconds: float
    flops: float
    peak_bytes: float
    planned_bytes: float


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """p of cost = c * size^p, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def regime_of(base: Regime, axis: str, size: int) -> Regime:
    """The base with another size."""
    changed: dict[str, Any] = {axis: size} | ({"batch": base.batch * size} if axis == "accumulation" else {})
    return evolve(base, name=f"{axis} {size}", **changed)


def measure(base: Regime, axis: str, sizes: Sequence[int], repeats: int) -> list[Point]:
    """Time all sizes in turns; the peak of each is that of a process of its own."""
    regimes = {size: regime_of(base, axis, size) for size in sizes}
    turns = {str(size): forge_runner(regime, "cpu", "fp32").step for size, regime in regimes.items()}
    seconds = alternate(turns, repeats, "cpu", lambda line: print(f"{axis}: {line}", file=sys.stderr))
    points = []
    for size, regime in regimes.items():
        config = job_config(regime, "cpu", "fp32")
        points.append(
            Point(
                size,
                median(seconds[str(size)]),
                count_flops_per_token(config.model, regime.seq_len) * regime.tokens,
                peak_memory(regime, "forge", "cpu", give_back=True),
                float(sum(plan_run(config, tflops=1.0).memory.values())),
            )
        )
    return points


def to_markdown(found: Mapping[str, Sequence[Point]], host: Mapping[str, str]) -> str:
    """A table of exponents, then one of all sizes."""
    exponents, sizes = [], []
    for axis, points in found.items():
        at = [point.size for point in points]
        costs = ([getattr(p, key) for p in points] for key in ("seconds", "flops", "peak_bytes", "planned_bytes"))
        exponents.append([axis, *(f"{exponent(at, cost):.2f}" for cost in costs)])
        for p in points:
            cells = (p.seconds * 1e3, p.flops / 1e9, p.peak_bytes / 2**20, p.planned_bytes / 2**20)
            sizes.append([axis, str(p.size), *(f"{cell:.1f}" for cell in cells)])
    facts = "\n".join(f"- {key}: {value}" for key, value in host.items())
    return f"""# How cost grows

{facts}

Exponents p of cost = c * size^p; predicted are those of counted FLOPs and planned memory.
The plan adds up gradients and activations, which are there together from the second micro-batch on.

{markdown_table(["axis", "seconds", "FLOPs (predicted)", "memory", "planned memory"], exponents)}

{markdown_table(["axis", "size", "ms an update", "GFLOPs", "MiB at the peak", "MiB planned"], sizes)}
"""


def plot(found: Mapping[str, Sequence[Point]], *both: Any) -> None:
    """Draw seconds and peak memory over each size, relative to the smallest."""
    shown = (("seconds", "flops"), ("peak_bytes", "planned_bytes"))
    for axes, (measured, predicted) in zip(both, shown, strict=True):
        for color, (axis, points) in enumerate(found.items()):
            at = [point.size / points[0].size for point in points]
            for key, style in ((measured, "-o"), (predicted, "--")):
                costs = [getattr(point, key) / getattr(points[0], key) for point in points]
                axes.loglog(at, costs, style, color=f"C{color}", label=axis if key == measured else None)
        axes.set_title(f"{measured} (dashed: {predicted})")
        axes.set_xlabel("size, relative to the smallest")
        axes.legend()


def main(argv: Sequence[str], base: Regime = BASE, axes: Mapping[str, tuple[int, ...]] = AXES) -> int:
    """Measure, print and write; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks.scaling")
        count, out = 2 if options.quick else None, writable_folder(options.out)
        found = {axis: measure(base, axis, sizes[:count], options.repeats) for axis, sizes in axes.items()}
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    host = describe_host("cpu")
    page = to_markdown(found, host)
    (out / f"{host['kind']}.scaling.md").write_text(page, encoding="utf-8")
    points = {axis: [asdict(point) for point in measured] for axis, measured in found.items()}
    (out / f"{host['kind']}.scaling.json").write_text(json.dumps(points, indent=1) + "\n", encoding="utf-8")
    print(page)
    print(draw(out / f"{host['kind']}.scaling.png", partial(plot, found)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
