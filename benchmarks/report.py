"""From seconds and bytes to a table, a verdict on every target, and files."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from attrs import frozen

from benchmarks.regimes import Device, Regime, job_config, timed_precision
from benchmarks.sides import APART, FLOOR, OURS, peers_of
from benchmarks.step import AGREEMENT_STEPS, MUON_TOLERANCE, TOLERANCE, Timings
from forge.errors import RunError
from forge.metrics import count_flops_per_token

MIB = 2**20
OVERHEAD = 0.01
"""Of forge's step over the hand-written loop of the same model, at most."""


@frozen
class Result:
    """What was measured in one regime."""

    regime: Regime
    timings: Timings
    peak_bytes: dict[str, float]  # by side: peak memory

    @property
    def sides(self) -> list[str]:
        """In the order of their turns."""
        return list(self.timings.seconds)

    def tokens_per_sec(self, side: str) -> float:
        """At the median turn."""
        return self.regime.tokens / median(self.timings.seconds[side])

    def speed_ratio(self, side: str) -> float:
        """forge's tokens/s over a side's: the ratio of medians."""
        return self.tokens_per_sec(OURS) / self.tokens_per_sec(side)

    def paired_ratios(self, side: str) -> list[float]:
        """A side's seconds over forge's in each round."""
        pairs = zip(self.timings.seconds[side], self.timings.seconds[OURS], strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def memory_ratio(self, side: str) -> float:
        """forge's peak over a side's."""
        return self.peak_bytes[OURS] / self.peak_bytes[side]

    @property
    def best_peer(self) -> str | None:
        """The peer with the most tokens/s."""
        return max(peers_of(self.sides), key=self.tokens_per_sec, default=None)

    @property
    def smallest_peer(self) -> str | None:
        """The peer with the lowest peak of memory."""
        return min(peers_of(self.sides), key=self.peak_bytes.__getitem__, default=None)

    @property
    def flops_per_token(self) -> float:
        """Matmul FLOPs of forward and backward, of the query-key pairs that the causal mask lets through."""
        return count_flops_per_token(job_config(self.regime, "cpu", "fp32").model, self.regime.seq_len)

    def gemm_share(self, tokens_per_sec: float) -> float:
        """The model's FLOP/s over the median rate of large matrix products in the same rounds."""
        return tokens_per_sec * self.flops_per_token / median(self.timings.gemm_flops)


class Verdict(NamedTuple):
    """One target and what came of it."""

    regime: str
    target: str
    measured: str
    met: bool


def verdicts(result: Result) -> list[Verdict]:
    """Every target of the regime."""
    regime, share = result.regime, result.gemm_share(result.tokens_per_sec(OURS))
    found = []
    if (best := result.best_peer) and (smallest := result.smallest_peer):
        ratio, target = result.speed_ratio(best), regime.speed_target
        wanted = f"tokens/s >= {target:.2f}x the best peer's ({best})"
        found.append(Verdict(regime.name, wanted, f"{ratio:.2f}x", ratio >= target))
        ratio, target = result.memory_ratio(smallest), regime.memory_target
        wanted = f"peak memory <= {target:.2f}x the smallest peer's ({smallest})"
        found.append(Verdict(regime.name, wanted, f"{ratio:.2f}x", ratio <= target))
    if FLOOR in result.sides and regime.optimizer == "adamw":  # two Muons differ in more than the loop
        overhead = 1 / median(result.paired_ratios(FLOOR)) - 1
        wanted = f"seconds <= {OVERHEAD:.0%} over the {FLOOR} loop's, median pair"
        found.append(Verdict(regime.name, wanted, f"{overhead:+.1%}", overhead <= OVERHEAD))
    if regime.gemm_target is not None:
        target = regime.gemm_target
        found.append(Verdict(regime.name, f"FLOP/s >= {target:.0%} of the GEMM rate", f"{share:.1%}", share >= target))
    return found


def describe_host(device: Device) -> dict[str, str]:
    """Where and with what the numbers were made; `kind` names the files."""
    if device == "cuda":
        chip = torch.cuda.get_device_name()
        kind = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    else:
        chip, kind = f"{_cpu_name()}, {torch.get_num_threads()} threads", f"cpu-{os.cpu_count()}-cores"
    return {
        "kind": kind,
        "device": chip,
        "precision": f"{timed_precision(device)} compute, fp32 parameters",
        "load": f"{os.getloadavg()[0]:.2f} before the run",
        "versions": f"torch {torch.__version__}, transformers {version('transformers')}",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def to_markdown(results: Sequence[Result], host: dict[str, str]) -> str:
    """The whole report."""
    measured = markdown_table(
        ["regime", "side", "tokens/s", "forge over it", "paired ratios: middle half (all)", "peak memory",
         "forge over it", "of GEMM rate", "first loss"],
        [_measured(result, side) for result in results for side in reversed(result.sides)],
    )  # fmt: skip
    targets = markdown_table(
        ["regime", "target", "measured", "verdict"],
        [[*v[:3], "met" if v.met else "**not met**"] for result in results for v in verdicts(result)],
    )
    shapes = markdown_table(
        ["regime", "vocabulary", "width", "layers", "heads", "tokens a sequence", "sequences", "updates a turn",
         "turns", "experts", "optimizer", "GEMM rate"],
        [_shape(result) for result in results],
    )  # fmt: skip
    where = "\n".join(f"- {key}: {value}" for key, value in host.items())
    return f"{_TITLE}\n{where}\n\n{measured}\n\n## Targets\n\n{targets}\n\n## Shapes\n\n{shapes}\n\n{_METHOD}\n"


_TITLE = """# forge's training step against its peers

Written by `python -m benchmarks`.
"""
_METHOD = f"""## How

*transformers* is transformers' Llama (sdpa attention), or its Mixtral where there are experts, in a plain loop of
forward with labels, backward, `clip_grad_norm_`, torch's fused AdamW and `zero_grad(set_to_none=True)`; *trainer* is
the same model in the loop of `transformers.Trainer`. *litgpt* is litgpt's GPT with its chunked loss, *torchtitan* is
torchtitan's Llama 3 with its loss and clipping, both in that plain loop. Peers run eagerly; `litgpt pretrain` would
compile. *hand-written* is forge's own model and loss in that loop: the floor of overhead, and no peer. All sides start
from the same weights and take the same batches with the same optimizer, decay groups and clipping; the losses of
{AGREEMENT_STEPS} updates must agree to {TOLERANCE:.0e} of their value, in fp32, or nothing is timed. With Muon the
others take `torch.optim.Muon`, whose iteration has other coefficients and is in bf16 everywhere: there the losses after
the first update must agree to {MUON_TOLERANCE:.0e}. Routers have no balance loss.
Then all sides and a large matrix product take turns: {", ".join(APART)} in a process
each, the others in one. tokens/s are those of the median turn and the ratio is that of medians; a paired ratio is the
side's seconds over forge's within one round.
Memory is that of a process for each side: the peak of a few updates less what was held just before the model was
built. FLOPs count matmuls, forward and backward, with the query-key pairs that the causal mask lets through."""


def _measured(result: Result, side: str) -> list[str]:
    low, lower, upper, high = np.percentile(result.paired_ratios(side), [0, 25, 75, 100])
    rate = result.tokens_per_sec(side)
    return [
        result.regime.name,
        side,
        f"{rate:,.0f}",
        f"{result.speed_ratio(side):.2f}x",
        f"{lower:.2f} to {upper:.2f} ({low:.2f} to {high:.2f})",
        f"{result.peak_bytes[side] / MIB:,.1f} MiB",
        f"{result.memory_ratio(side):.2f}x",
        f"{result.gemm_share(rate):.1%}",
        f"{result.timings.first_losses[side]:.6f}",
    ]


def _shape(result: Result) -> list[str]:
    regime = result.regime
    numbers = (regime.vocab_size, regime.dim, regime.n_layers, regime.n_heads, regime.seq_len, regime.batch)
    turns = (regime.steps, len(result.timings.seconds[OURS]), regime.experts)
    rate = f"{median(result.timings.gemm_flops) / 1e12:.3f} TFLOP/s"
    return [regime.name, *map(str, numbers + turns), regime.optimizer, rate]


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_json(results: Sequence[Result], host: dict[str, str]) -> dict[str, Any]:
    """Every number, raw and derived."""
    return {
        "host": host,
        "results": [
            attrs.asdict(result)
            | {
                "tokens_per_sec": {side: result.tokens_per_sec(side) for side in result.sides},
                "speed_ratio": {side: result.speed_ratio(side) for side in result.sides},
                "memory_ratio": {side: result.memory_ratio(side) for side in result.sides},
                "flops_per_token": result.flops_per_token,
                "gemm_share": result.gemm_share(result.tokens_per_sec(OURS)),
                "verdicts": [verdict._asdict() for verdict in verdicts(result)],
            }
            for result in results
        ],
    }


def writable_folder(path: str | Path) -> Path:
    """The folder of `--out`, made before anything is measured that could not be kept.

    Raises:
        RunError: it cannot be made, or not be written to.
    """
    out = Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out).close()
    except OSError as error:
        raise RunError(f"{out}: cannot be written to: {error.strerror}; choose another --out") from None
    return out


def write_report(results: Sequence[Result], host: dict[str, str], out: Path, stem: str) -> list[str]:
    """Write `<stem>.md`, `.json` and `.png` into a folder.

    Returns:
        One line a file: what was written, or why the plot was not.
    """
    (out / f"{stem}.md").write_text(to_markdown(results, host), encoding="utf-8")
    (out / f"{stem}.json").write_text(json.dumps(to_json(results, host), indent=1) + "\n", encoding="utf-8")
    lines = [f"wrote {out / stem}.{kind}" for kind in ("md", "json")]
    return [*lines, draw(out / f"{stem}.png", partial(_plot, results))]


def draw(path: Path, onto: Callable[[Any, Any], None]) -> str:
    """Draw on two axes side by side, where matplotlib is; one line: what was written, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install -e '.[bench]')"
    figure = Figure(figsize=(10, 4), layout="constrained")
    onto(*figure.subplots(1, 2))
    figure.savefig(path, dpi=120)
    return f"wrote {path}"


def _plot(results: Sequence[Result], speed: Any, memory: Any) -> None:
    for axes, title in (
        (speed, "tokens/s, forge over the best peer"),
        (memory, "peak memory, forge over the smallest"),
    ):
        axes.set_title(title)
        axes.axhline(1.0, color="0.5", linewidth=0.8)
        axes.set_xticks(range(len(results)), [result.regime.name.replace(" ", "\n") for result in results])
    for at, result in enumerate(results):
        if (best := result.best_peer) is None or (smallest := result.smallest_peer) is None:
            continue
        speed.bar(at, result.speed_ratio(best), width=0.5, color="tab:blue")
        speed.plot([at] * len(result.paired_ratios(best)), result.paired_ratios(best), "k.", markersize=3)
        memory.bar(at, result.memory_ratio(smallest), width=0.5, color="tab:orange")
        for axes, target in ((speed, result.regime.speed_target), (memory, result.regime.memory_target)):
            axes.hlines(target, at - 0.4, at + 0.4, color="tab:red", linestyle="--")
    speed.set_xlabel("dots: single rounds; dashes: targets")
