"""From seconds and bytes to a table, a verdict on every target, and files."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from attrs import frozen

from benchmarks.regimes import Device, Regime, job_config, timed_precision
from benchmarks.step import AGREEMENT_STEPS, TOLERANCE, Timings
from forge.metrics import count_flops_per_token

MIB = 2**20


@frozen
class Result:
    """What was measured in one regime."""

    regime: Regime
    timings: Timings
    peer_bytes: float  # peak memory
    forge_bytes: float

    @property
    def peer_tokens_per_sec(self) -> float:
        """At the median turn."""
        return self.regime.tokens / median(self.timings.peer_seconds)

    @property
    def forge_tokens_per_sec(self) -> float:
        """At the median turn."""
        return self.regime.tokens / median(self.timings.forge_seconds)

    @property
    def speed_ratio(self) -> float:
        """forge's tokens/s over the peer's: the ratio of medians."""
        return self.forge_tokens_per_sec / self.peer_tokens_per_sec

    @property
    def paired_ratios(self) -> list[float]:
        """The peer's seconds over forge's in each round."""
        pairs = zip(self.timings.peer_seconds, self.timings.forge_seconds, strict=True)
        return [theirs / ours for theirs, ours in pairs]

    @property
    def memory_ratio(self) -> float:
        """forge's peak over the peer's."""
        return self.forge_bytes / self.peer_bytes

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
    regime, share = result.regime, result.gemm_share(result.forge_tokens_per_sec)
    found = [
        Verdict(
            regime.name,
            f"tokens/s >= {regime.speed_target:.2f}x the peer's",
            f"{result.speed_ratio:.2f}x",
            result.speed_ratio >= regime.speed_target,
        )
    ]
    if regime.memory_target is not None:
        ratio, target = result.memory_ratio, regime.memory_target
        found.append(Verdict(regime.name, f"peak memory <= {target:.2f}x the peer's", f"{ratio:.2f}x", ratio <= target))
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
        ["regime", "forge tokens/s", "peer tokens/s", "ratio", "paired ratios: middle half (all)",
         "forge memory", "peer memory", "ratio", "forge of GEMM rate", "peer of GEMM rate", "GEMM rate"],
        [_measured(result) for result in results],
    )  # fmt: skip
    targets = markdown_table(
        ["regime", "target", "measured", "verdict"],
        [[*v[:3], "met" if v.met else "**not met**"] for result in results for v in verdicts(result)],
    )
    shapes = markdown_table(
        ["regime", "vocabulary", "width", "layers", "heads", "tokens a sequence", "sequences", "updates a turn",
         "turns", "first loss (forge, peer)"],
        [_shape(result) for result in results],
    )  # fmt: skip
    where = "\n".join(f"- {key}: {value}" for key, value in host.items())
    return f"{_TITLE}\n{where}\n\n{measured}\n\n## Targets\n\n{targets}\n\n## Shapes\n\n{shapes}\n\n{_METHOD}\n"


_TITLE = """# forge's training step against transformers' LlamaForCausalLM

Written by `python -m benchmarks`.
"""
_METHOD = f"""## How

The peer is `LlamaForCausalLM` (sdpa attention) in a plain loop: forward with labels, backward, `clip_grad_norm_`,
fused `torch.optim.AdamW`, `zero_grad(set_to_none=True)`. Both sides start from the same weights and take the same
batches with the same optimizer, decay groups and clipping; the losses of {AGREEMENT_STEPS} updates must agree to
{TOLERANCE:.0e} of their value, in fp32, or nothing is timed. Then the peer, forge and a large matrix product take turns
in one process. tokens/s are those of the median turn and the ratio is that of medians; a paired ratio is peer over
forge within one round. Memory is that of a process for each side: the peak of a few updates less what was held just
before the model was built. FLOPs count matmuls, forward and backward, with the query-key pairs that the causal mask
lets through."""


def _measured(result: Result) -> list[str]:
    low, lower, upper, high = np.percentile(result.paired_ratios, [0, 25, 75, 100])
    ours, theirs = result.forge_tokens_per_sec, result.peer_tokens_per_sec
    return [
        result.regime.name,
        f"{ours:,.0f}",
        f"{theirs:,.0f}",
        f"{result.speed_ratio:.2f}x",
        f"{lower:.2f} to {upper:.2f} ({low:.2f} to {high:.2f})",
        f"{result.forge_bytes / MIB:,.1f} MiB",
        f"{result.peer_bytes / MIB:,.1f} MiB",
        f"{result.memory_ratio:.2f}x",
        f"{result.gemm_share(ours):.1%}",
        f"{result.gemm_share(theirs):.1%}",
        f"{median(result.timings.gemm_flops) / 1e12:.3f} TFLOP/s",
    ]


def _shape(result: Result) -> list[str]:
    regime, (theirs, ours) = result.regime, result.timings.first_losses
    numbers = (regime.vocab_size, regime.dim, regime.n_layers, regime.n_heads, regime.seq_len, regime.batch)
    turns = (regime.steps, len(result.timings.forge_seconds))
    return [regime.name, *map(str, numbers + turns), f"{ours:.6f}, {theirs:.6f}"]


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
                "forge_tokens_per_sec": result.forge_tokens_per_sec,
                "peer_tokens_per_sec": result.peer_tokens_per_sec,
                "speed_ratio": result.speed_ratio,
                "paired_ratios": result.paired_ratios,
                "memory_ratio": result.memory_ratio,
                "flops_per_token": result.flops_per_token,
                "gemm_share": result.gemm_share(result.forge_tokens_per_sec),
                "verdicts": [verdict._asdict() for verdict in verdicts(result)],
            }
            for result in results
        ],
    }


def write_report(results: Sequence[Result], host: dict[str, str], out: Path, stem: str) -> list[str]:
    """Write `<stem>.md`, `.json` and `.png` into a folder.

    Returns:
        One line a file: what was written, or why the plot was not.
    """
    (out / f"{stem}.md").write_text(to_markdown(results, host), encoding="utf-8")
    (out / f"{stem}.json").write_text(json.dumps(to_json(results, host), indent=1) + "\n", encoding="utf-8")
    lines = [f"wrote {out / stem}.{kind}" for kind in ("md", "json")]
    return [*lines, _plot(results, out / f"{stem}.png")]


def _plot(results: Sequence[Result], path: Path) -> str:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install -e '.[bench]')"
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for axes, title in ((speed, "tokens/s, forge over peer"), (memory, "peak memory, forge over peer")):
        axes.set_title(title)
        axes.axhline(1.0, color="0.5", linewidth=0.8)
        axes.set_xticks(range(len(results)), [result.regime.name for result in results])
    for at, result in enumerate(results):
        speed.bar(at, result.speed_ratio, width=0.5, color="tab:blue")
        speed.plot([at] * len(result.paired_ratios), result.paired_ratios, "k.", markersize=3)
        memory.bar(at, result.memory_ratio, width=0.5, color="tab:orange")
        for axes, target in ((speed, result.regime.speed_target), (memory, result.regime.memory_target)):
            if target is not None:
                axes.hlines(target, at - 0.4, at + 0.4, color="tab:red", linestyle="--")
    speed.set_xlabel("dots: single rounds; dashes: targets")
    figure.savefig(path, dpi=120)
    return f"wrote {path}"
