"""`python -m benchmarks.layouts`: what the ranks of each layout send and hold, against the plan, on gloo.

And the time of forge's step over that of a hand-written FSDP2 loop, on two ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import numpy as np
from attrs import field, frozen

from benchmarks.layout_runs import EXPERTS, LARGE, SHAPE, Measured, Turns, job_of, measure, take_turns
from benchmarks.ranks import run_on_ranks
from benchmarks.report import describe_host, markdown_table, writable_folder
from benchmarks.step import TOLERANCE
from forge.config import JobConfig, ModelConfig
from forge.config.checks import integer
from forge.config.flags import parse
from forge.errors import ForgeError, RunError
from forge.metrics import count_parameters
from forge.training.plan_ranks import plan_ranks

MIB = 2**20
OVERHEAD_TARGET = 1.03
"""forge's seconds over the hand-written loop's, at most."""


class Case(NamedTuple):
    """A layout of the table."""

    name: str
    ranks: int
    sizes: dict[str, Any]
    model: ModelConfig = SHAPE
    micro_batch: int = 2


CASES = [
    Case("one process", 1, {}),
    Case("fsdp2", 2, {}),
    Case("ddp2", 2, {"dp_replicate": 2}),
    Case("tp2", 2, {"tp": 2}),
    Case("cp2", 2, {"cp": 2}),
    Case("pp2, 1f1b", 2, {"pp": 2}),
    Case("pp2, zero_bubble", 2, {"pp": 2, "pp_schedule": "zero_bubble"}),
    Case("ep2, experts", 2, {"ep": 2}, EXPERTS),
    Case("fsdp4", 4, {}),
    Case("hsdp 2 x 2", 4, {"dp_replicate": 2}),
    Case("fsdp2 x tp2", 4, {"tp": 2}),
    Case("fsdp2 x cp2", 4, {"cp": 2}),
    Case("fsdp2 x pp2", 4, {"pp": 2}),
    Case("fsdp2 x ep2, experts", 4, {"ep": 2}, EXPERTS),
]
SHARDED = [Case("one process", 1, {}, LARGE), Case("fsdp4", 4, {}, LARGE)]


@frozen
class Options:
    """What the ranks of each layout send and hold, and the step's time over a hand-written FSDP2 loop."""

    SECTION: ClassVar[str] = ""

    out: str = str(Path(__file__).parent / "results")
    """Folder for <host kind>.layouts.md and <host kind>.overhead.md."""
    sizes: bool = True
    """Messages and memory by layout: the same on a busy machine."""
    timing: bool = True
    """The step's time: wants a quiet machine."""
    steps: int = field(default=4, validator=integer(least=1))
    """Updates a turn."""
    repeats: int = field(default=15, validator=integer(least=1))
    """Turns of each side."""


def main(argv: Sequence[str]) -> int:
    """Run as the flags say; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks.layouts")
        out, host = writable_folder(options.out), describe_host("cpu")
        if options.sizes:
            _write(out / f"{host['kind']}.layouts.md", sizes_page(measure_cases(CASES), measure_cases(SHARDED), host))
        if options.timing:
            turns = run_on_ranks(take_turns, 2, job_of(SHAPE, {}, micro_batch=4), options.steps, options.repeats)[0]
            _write(out / f"{host['kind']}.overhead.md", overhead_page(turns, host))
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def _write(path: Path, page: str) -> None:
    path.write_text(page, encoding="utf-8")
    print(f"{page}\nwrote {path}")


Found = list[tuple[Case, list[Measured]]]


def measure_cases(cases: Sequence[Case]) -> Found:
    """All cases of one number of ranks in one start of them, in turn."""
    found: Found = []
    for world_size in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == world_size]
        by_rank = run_on_ranks(_measure_all, world_size, [_job(case) for case in chosen])
        found += [(case, [rank[at] for rank in by_rank]) for at, case in enumerate(chosen)]
    return found


def _measure_all(configs: Sequence[JobConfig]) -> list[Measured]:
    return [measure(config) for config in configs]


def _job(case: Case) -> JobConfig:
    return job_of(case.model, case.sizes, micro_batch=case.micro_batch)


def sizes_page(layouts: Found, sharded: Found, host: dict[str, str]) -> str:
    """Messages and memory of every layout, and of a model that is large beside what else there is."""
    sent = [cells for case, ranks in layouts if case.ranks > 1 for cells in _sent(case, ranks)]
    held = [_held(case, ranks) for case, ranks in layouts]
    large = [_initial(case, ranks) for case, ranks in sharded]
    parts = [
        "# What ranks send and hold, by layout",
        "Written by `python -m benchmarks.layouts`.",
        "\n".join(f"- {key}: {value}" for key, value in host.items() if key in ("kind", "versions")),
        f"## Sent in a step\n\n{_SENT}",
        markdown_table(["layout", "kind", "measured", "planned", "measured / planned"], sent),
        f"## Held at the peak\n\n{_HELD}",
        markdown_table(["layout", "measured", "planned", "planned / measured"], held),
        f"## Nothing is allocated in full\n\n{_LARGE}",
        markdown_table(
            ["layout", "parameters here", "peak of building", "peak of building and a step", "process grew by"], large
        ),
    ]
    return "\n\n".join(parts) + "\n"


_SENT = """KiB that leave one rank, mean over the ranks, counted where torch dispatches collectives and messages
(`benchmarks/traffic.py`), beside `forge/training/plan_traffic.py`. Exchanges between experts go as the routers say;
the plan has even ones."""
_HELD = """MiB of tensors on the fullest rank, by torch's own count of its allocations, in building the model, its state
and one step; beside the plan, whose parts each have their own largest and seldom all at once."""
_LARGE = f"""MiB on the fullest rank, of a model of {count_parameters(LARGE).total / 1e6:.0f} M parameters in fp32:
built on the meta device, allocated as this rank's parts only, and filled parameter by parameter."""


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _sent(case: Case, ranks: list[Measured]) -> list[list[str]]:
    plan = plan_ranks(_job(case), case.ranks, tflops=1.0)
    rows = []
    for kind in sorted({kind for rank in ranks for kind in rank.sent}):
        measured = _mean([rank.sent.get(kind, 0) for rank in ranks])
        planned = _mean([plan.traffic[rank.pp_rank].get(kind, 0) for rank in ranks])
        rows.append([case.name, kind, f"{measured / 1024:,.2f}", f"{planned / 1024:,.2f}", f"{measured / planned:.4g}"])
    return rows


def _held(case: Case, ranks: list[Measured]) -> list[str]:
    peak = max(rank.peak for rank in ranks)
    planned = plan_ranks(_job(case), case.ranks, tflops=1.0).bytes_a_rank
    return [case.name, _mib(peak), _mib(planned), f"{planned / peak:.2f}"]


def _initial(case: Case, ranks: list[Measured]) -> list[str]:
    plan = plan_ranks(_job(case), case.ranks, tflops=1.0)
    grown = max(rank.resident for rank in ranks)
    parameters = plan.memory[plan.fullest]["parameters"]
    peaks = (max(rank.initial for rank in ranks), max(rank.peak for rank in ranks), grown)
    return [case.name, _mib(parameters), *map(_mib, peaks)]


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def overhead_page(turns: Turns, host: dict[str, str]) -> str:
    """forge's seconds over those of a hand-written loop.

    Raises:
        RunError: the two do not compute the same.
    """
    for ours, theirs in turns.losses:
        if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
            raise RunError(f"the losses differ, {ours:.6f} and {theirs:.6f}: the two do not compute the same thing")
    ratios = [ours / theirs for ours, theirs in zip(turns.forge, turns.plain, strict=True)]
    low, lower, upper, high = np.percentile(ratios, [0, 25, 75, 100])
    ratio = median(turns.forge) / median(turns.plain)
    row = [
        f"{1e3 * median(turns.forge):.2f} ms", f"{1e3 * median(turns.plain):.2f} ms", f"{ratio:.3f}x",
        f"{median(ratios):.3f} ({lower:.3f} to {upper:.3f}; all {low:.3f} to {high:.3f})",
        "met" if ratio <= OVERHEAD_TARGET else "**not met**",
    ]  # fmt: skip
    parts = [
        "# forge's step over a hand-written FSDP2 loop",
        "Written by `python -m benchmarks.layouts`.",
        "\n".join(f"- {key}: {value}" for key, value in host.items()),
        markdown_table(
            ["forge", "by hand", "ratio of medians", "paired ratios: median (middle half; all)",
             f"at most {OVERHEAD_TARGET}x"],
            [row],
        ),
        _OVERHEAD,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


_OVERHEAD = f"""Two ranks on gloo, one thread each; {count_parameters(SHAPE).total / 1e6:.1f} M parameters, eight
sequences of {SHAPE.max_seq_len} tokens an update. By hand is the same module under `fully_shard`, with the same loss,
`clip_grad_norm_`, fused `torch.optim.AdamW` and one all-reduce of the loss, without accumulation. The losses of the
first updates agree, or nothing is written; then the two take turns in the same processes."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
