"""The layouts and training features whose combinations the suite trains, as data, and the page that says what came out.

`tests/distributed/test_parity.py` trains every row by every job, in one start of two ranks and one of four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attrs import evolve

from forge.config import JobConfig, Muon
from tests.distributed.training import JOB, MODEL, MOE, TRAIN, Curve, global_batch

PAGE = Path(__file__).parent.parent.parent / "docs" / "layouts.md"
WRITE = "FORGE_WRITE_DOCS"
"""Environment variable that has the page written instead of compared."""


class Row(NamedTuple):
    """A layout, on as many ranks as the test starts."""

    name: str
    ranks: int
    sizes: dict[str, Any]  # of the distributed section
    model: str = "dense"
    micro_batch: int = 2

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.ranks // (self.sizes.get("tp", 1) * self.sizes.get("cp", 1) * self.sizes.get("pp", 1))


ROWS = [
    Row("fsdp2", 2, {}),
    Row("ddp2", 2, {"dp_replicate": 2}),
    Row("fsdp4", 4, {}, micro_batch=1),
    Row("hsdp 2 x 2", 4, {"dp_replicate": 2}, micro_batch=1),
    Row("tp2", 2, {"tp": 2}, micro_batch=4),
    Row("fsdp2 x tp2", 4, {"tp": 2}),
    Row("cp2", 2, {"cp": 2}),
    Row("fsdp2 x cp2", 4, {"cp": 2}),
    *(Row(f"pp2, {schedule}", 2, {"pp": 2, "pp_schedule": schedule}) for schedule in ("1f1b", "gpipe", "zero_bubble")),
    Row("pp2, interleaved_1f1b", 2, {"pp": 2, "pp_schedule": "interleaved_1f1b"}, "deep"),
    Row("pp2 x fsdp2", 4, {"pp": 2}),
    Row("pp2 x tp2", 4, {"pp": 2, "tp": 2}, micro_batch=4),
    Row("ep2", 2, {"ep": 2}, "experts", micro_batch=1),
    Row("fsdp2 x ep2", 4, {"ep": 2}, "experts", micro_batch=1),
]
MODELS = {"dense": evolve(MODEL, n_layers=2), "deep": MODEL, "experts": evolve(MOE, n_layers=2)}
JOBS = {"adamw": JOB, "muon, tied": evolve(JOB, optimizer=Muon(adam_lr=1e-2))}


def job_of(row: Row, job: str) -> JobConfig:
    """What a row trains, without its layout."""
    model = evolve(MODELS[row.model], tied_embeddings=job == "muon, tied")
    return evolve(JOBS[job], model=model, train=evolve(TRAIN, micro_batch_size=row.micro_batch))


def _targets_differ(row: Row, job: JobConfig, curve: Curve) -> bool:
    """The data ranks have different numbers of targets, and so have the micro-batches of the first of them."""
    targets = (global_batch(0).labels[0] != -100).sum(-1).view(row.data_ranks, -1, row.micro_batch).sum(-1)
    totals, first = targets.sum(-1).tolist(), targets[0].tolist()
    return len(set(totals)) == len(totals) and len(set(first)) > 1


Evidence = Callable[[Row, JobConfig, Curve], bool]
COLUMNS: dict[str, tuple[tuple[str, ...], Evidence]] = {
    "accumulation": (tuple(JOBS), lambda row, job, curve: job.accumulation_steps(row.data_ranks) > 1),
    "unequal targets": (tuple(JOBS), _targets_differ),
    "documents": (tuple(JOBS), lambda row, job, curve: bool(global_batch(0).doc_ids.any())),
    "clipping": (tuple(JOBS), lambda row, job, curve: min(curve.norms) > (job.train.grad_clip_norm or 0) > 0),
    "tied embeddings": (("muon, tied",), lambda row, job, curve: "head.weight" not in curve.params),
    "AdamW": (("adamw",), lambda row, job, curve: job.optimizer.name == "adamw"),
    "Muon": (("muon, tied",), lambda row, job, curve: job.optimizer.name == "muon"),
}
"""Feature -> the jobs that have it, and what shows that one really had it."""


def page(held: Mapping[tuple[str, str], bool], refusals: Mapping[str, tuple[str, str]]) -> str:
    """The page in Markdown.

    Args:
        held: (row, job) -> whether six updates were those of one process.
        refusals: what cannot be -> the flags of an example, and the line that it is answered with.
    """
    lines = [
        "# Layouts that train as one process does",
        "",
        "Written by the test suite: `tests/distributed/test_parity.py`. Each row was trained for six updates of a tiny",
        "model in fp32, on gloo, and again by one process; it holds where all losses agree to 1e-5 and gradient norms to",
        "1e-4, relatively, and the final parameters to rounding. Layouts mix freely beyond these rows; what cannot be is",
        "below.",
        "",
        _line(["layout", "ranks", *COLUMNS]),
        _line(["---"] * (2 + len(COLUMNS))),
    ]
    for row in ROWS:
        cells = ("holds" if all(held[row.name, job] for job in jobs) else "**differs**" for jobs, _ in COLUMNS.values())
        model = ", experts" if row.model == "experts" else ""
        lines.append(_line([row.name + model, str(row.ranks), *cells]))
    lines += [
        "",
        "## Refused",
        "",
        "Each is one line and exit status 2, before anything is allocated.",
        "",
        _line(["what", "example", "answer"]),
        _line(["---"] * 3),
    ]
    lines += [_line([what, f"`{flags}`", answer]) for what, (flags, answer) in refusals.items()]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
