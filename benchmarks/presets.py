"""`python -m benchmarks.presets`: what a rank of every preset holds and sends on 8 to 1024 GPUs, by calculation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve

from forge.config import DistributedConfig, JobConfig, load_config
from forge.errors import ConfigError
from forge.training.plan_layout import Layout
from forge.training.plan_ranks import LayoutPlan, plan_ranks

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "results" / "plan-presets.md"
GPUS = (8, 64, 256, 1024)
NODE = 8
"""GPUs that talk fast to each other: tensor and expert parallelism stay among them."""
MOST_SHARDS = 64
"""Ranks that share one replica, at most: more make the messages of a block small."""
ROOM = 64 * 2**30
"""Bytes that a plan may take of an 80 GiB device; the rest is for kernels, fragments and messages on their way."""
PARTS = ("parameters", "gradients", "optimizer", "gathered", "unreduced", "activations", "logits")


def layouts_for(config: JobConfig, gpus: int) -> Iterator[JobConfig]:
    """Layouts from the plainest on: experts over a node, then ever more of TP, then a pipeline beside it.

    What is left shares the parameters, in replicas of at most MOST_SHARDS. A batch that is too small for that many
    ranks is cut into smaller micro-batches, and then grows to one sequence a data rank.
    """
    experts = config.model.moe.n_experts
    for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)):
        ep = min(experts, NODE // tp) if experts else 1
        data = gpus // (tp * pp)
        if tp * pp > gpus or data % ep:
            continue
        shards = min(data, MOST_SHARDS)
        chosen = DistributedConfig(dp_replicate=data // shards, dp_shard=shards // ep, ep=ep, tp=tp, pp=pp)
        train = config.train
        batch = max(train.global_batch_size, data * pp)
        micro = max(1, min(train.micro_batch_size, batch // (data * pp)))
        yield evolve(config, distributed=chosen, train=evolve(train, global_batch_size=batch, micro_batch_size=micro))


def plan_preset(config: JobConfig, gpus: int) -> LayoutPlan:
    """The first layout that fits, or the one that comes nearest to it."""
    plans = []
    for candidate in layouts_for(config, gpus):
        try:
            plans.append(plan_ranks(candidate, gpus, tflops=1.0))
        except ConfigError:  # heads, widths or layers do not divide
            continue
        if plans[-1].bytes_a_rank <= ROOM:
            return plans[-1]
    return min(plans, key=lambda plan: plan.bytes_a_rank)


def rows(name: str, config: JobConfig) -> list[str]:
    """A preset's lines of the table."""
    found = []
    for gpus in GPUS:
        plan = plan_preset(config, gpus)
        layout, memory = plan.layout, plan.memory[plan.fullest]
        total = f"{_gib(plan.bytes_a_rank)}{'' if plan.bytes_a_rank <= ROOM else ' (too much)'}"
        cells = [name, str(gpus), _sizes(layout), _batch(layout), *(_gib(memory[part]) for part in PARTS), total]
        found.append(f"| {' | '.join([*cells, _gib(sum(plan.traffic[plan.fullest].values()))])} |")
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:.{2 if size >= 2**26 else 4}f}"


def _sizes(layout: Layout) -> str:
    return " x ".join(f"{dim} {size}" for dim, size in layout.sizes.items() if size > 1)


def _batch(layout: Layout) -> str:
    train = layout.config.train
    return f"{layout.data_ranks} x {train.micro_batch_size} x {layout.accumulation}"


def table(presets: Sequence[Path]) -> str:
    """The whole page."""
    head = ["preset", "GPUs", "layout", "batch", *PARTS, "GiB a rank", "GiB sent a step"]
    lines = [
        "# What a rank of each preset holds and sends",
        "",
        "Made by `python -m benchmarks.presets`; calculated as `python cli.py plan --gpus N` does, in bf16, and not",
        "measured. GiB on the fullest rank, by part. The layout is the first of a few plain ones that takes at most",
        f"{ROOM // 2**30} GiB (of an 80 GiB device): ever more tensor parallelism, then a pipeline beside it; what is",
        f"left shares the parameters, in replicas of {MOST_SHARDS} ranks at most. Batch: data ranks x sequences of a",
        "micro-batch x micro-batches an update; it is the preset's own, but where that has too few sequences.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
    ]
    for path in presets:
        lines += rows(path.stem, load_config(path))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the page and write it."""
    page = table(sorted((ROOT / "configs").glob("*.toml")))
    TABLE.write_text(page, encoding="utf-8")
    print(page)
    print(f"wrote {TABLE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
