"""A plan of every rank of a layout, by calculation: memory of the fullest, and what it sends in a step."""

from __future__ import annotations

import math

import torch
from attrs import evolve, frozen

from forge.config import JobConfig
from forge.metrics import ParameterCount, count_flops_per_token, count_parameters
from forge.model import build_model
from forge.model.attention import check_attention_backend
from forge.training.average import init_ema
from forge.training.optimizer import job_optimizer, parameter_roles
from forge.training.plan import (
    check_addressable,
    format_count,
    format_duration,
    format_size,
    learned_names,
    logit_bytes,
    tree_bytes,
)
from forge.training.plan_activations import Activations, count_activations, twin_of_rank
from forge.training.plan_layout import Layout, build_layout
from forge.training.plan_traffic import REDUCED_ITEMSIZE, step_traffic
from forge.training.runtime import build_runtime


@frozen
class LayoutPlan:
    """Sizes of one run on a number of GPUs."""

    layout: Layout
    parameters: ParameterCount
    flops_per_token: float  # forward and backward
    total_tokens: int
    memory: tuple[dict[str, int], ...]  # of each pipeline rank's fullest process: bytes by part
    traffic: tuple[dict[str, float], ...]  # of each pipeline rank: bytes that a process sends in a step, by kind
    tflops: float  # rate assumed of one GPU for the time, 1e12 FLOP/s

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most memory."""
        totals = [sum(parts.values()) for parts in self.memory]
        return totals.index(max(totals))

    @property
    def bytes_a_rank(self) -> int:
        """Memory of the fullest rank."""
        return sum(self.memory[self.fullest].values())

    @property
    def seconds(self) -> float:
        """Time of the whole run at the assumed rate."""
        return self.flops_per_token * self.total_tokens / (self.layout.gpus * self.tflops * 1e12)


def plan_ranks(config: JobConfig, gpus: int, *, tflops: float) -> LayoutPlan:
    """Calculate what each of `gpus` processes will take; no process is started.

    `train.precision = auto` is bf16, as on the GPUs that are planned for.

    Args:
        tflops: rate at which one GPU computes, in 1e12 FLOP/s.

    Raises:
        ConfigError: the run would be refused.
    """
    check_addressable(config)
    check_attention_backend(config, torch.device("cpu" if config.train.device == "cpu" else "cuda"))
    config = _on_gpus(config)
    runtime = build_runtime(config)
    layout = build_layout(config, gpus, runtime.compute_dtype, runtime.param_dtype)
    meta = {name: torch.empty(shape, device="meta", dtype=torch.float32) for name, shape in layout.shapes.items()}
    learned = learned_names(config, meta)
    ranks = range(layout.sizes["pp"])
    activations = count_activations(layout)
    return LayoutPlan(
        layout=layout,
        parameters=count_parameters(config.model),
        flops_per_token=count_flops_per_token(config.model, config.train.seq_len),
        total_tokens=config.train.steps * config.train.global_batch_size * config.train.seq_len,
        memory=tuple(stored_bytes(layout, rank, learned) | _passing_bytes(layout, rank, learned, activations)
                     for rank in ranks),
        traffic=tuple(step_traffic(layout, rank, learned) for rank in ranks),
        tflops=tflops,
    )  # fmt: skip


def _on_gpus(config: JobConfig) -> JobConfig:
    """The config with the precision that it has there, whatever this machine is; `train.device = cpu` means CPUs."""
    precision = config.train.precision
    if precision == "auto":
        precision = "fp32" if config.train.device == "cpu" else "bf16"
    return evolve(config, train=evolve(config.train, device="cpu", precision=precision))


def stored_bytes(layout: Layout, pp_rank: int, learned: frozenset[str], shard_rank: int = 0) -> dict[str, int]:
    """What a rank keeps from step to step, and its gradients: exactly what `build_parts` and a step make there.

    Optimizers are asked for their state of parameters without storage.

    Args:
        shard_rank: place among the ranks (dp_shard, ep, cp) of FSDP2; the first has the most.
    """
    held = {
        name: torch.empty(layout.local_shape(name, shard_rank), device="meta", dtype=layout.param_dtype)
        for stage in layout.stages(pp_rank)
        for name in stage
    }
    trained = {name: p for name, p in held.items() if name in learned}
    optimizer = job_optimizer(layout.config, parameter_roles(build_model(layout.config.model)))
    return {
        "parameters": tree_bytes(held),
        "gradients": tree_bytes(trained),
        "optimizer": tree_bytes(optimizer.init(trained)),
        **({"average": tree_bytes(ema)} if (ema := init_ema(layout.config.train, held)) else {}),
    }


def _passing_bytes(layout: Layout, pp_rank: int, learned: frozenset[str], activations: Activations) -> dict[str, int]:
    """What comes and goes within a step, each at its own largest.

    FSDP2 holds two blocks gathered, the one that computes and the next, beside what is outside the blocks; a pipeline
    holds its stages whole. Between micro-batches the gradients wait unreduced, in fp32 and uncut by FSDP2; beside them
    is what is being reduced: a block, in fp32.
    """
    stages = layout.stages(pp_rank)
    groups = [layout.groups(stage) for stage in stages]
    gathered = {key: _numel(layout, names) for found in groups for key, names in found.items() if key}
    outside = sum(_numel(layout, found.get("", [])) for found in groups)
    piped = layout.sizes["pp"] > 1
    open_blocks = sum(gathered.values()) if piped else sum(sorted(gathered.values())[-2:])
    grads = [[name for name in names if name in learned] for found in groups for names in found.values()]
    largest = max((_numel(layout, names) for names in grads), default=0)
    waits = piped or layout.accumulation > 1
    unreduced = (
        sum(_numel(layout, names) for names in grads) * REDUCED_ITEMSIZE
        if waits
        else (largest * layout.compute_dtype.itemsize)
    )
    return {
        "gathered": (outside + open_blocks) * layout.compute_dtype.itemsize,
        "unreduced": unreduced + largest * REDUCED_ITEMSIZE,
        "activations": activations.of_rank(layout, pp_rank),
        "logits": logit_bytes(twin_of_rank(layout)) if pp_rank == layout.sizes["pp"] - 1 else 0,
    }


def _numel(layout: Layout, names: list[str]) -> int:
    return sum(math.prod(layout.gathered_shape(name)) for name in names)


def format_ranks(plan: LayoutPlan) -> str:
    """The plan as a table of lines."""
    layout, rank = plan.layout, plan.fullest
    train, memory, traffic = layout.config.train, plan.memory[rank], plan.traffic[rank]
    of_pipeline = f" (pipeline rank {rank} of {layout.sizes['pp']})" if layout.sizes["pp"] > 1 else ""
    lines = [
        f"layout            {format_layout(layout)}",
        f"batch             {train.global_batch_size} sequences: {layout.data_ranks} data ranks x"
        f" {train.micro_batch_size} a micro-batch x {layout.accumulation} accumulated",
        f"parameters        {format_count(plan.parameters.total):>10}   active {format_count(plan.parameters.active)}",
        f"memory            {format_size(plan.bytes_a_rank):>10}   on the fullest rank{of_pipeline}",
    ]
    lines += [f"  {part:<16}{format_size(size):>10}" for part, size in memory.items() if size]
    lines.append(f"sent              {format_size(sum(traffic.values())):>10}   a step by that rank")
    lines += [f"  {kind:<16}{format_size(size):>10}" for kind, size in traffic.items()]
    lines.append(f"time              {format_duration(plan.seconds):>10}   at {plan.tflops:.4g} TFLOP/s a GPU")
    return "\n".join(lines)


def format_layout(layout: Layout) -> str:
    """'64 GPUs: dp_shard 16 x tp 4', leaving out what is 1."""
    sizes = " x ".join(f"{dim} {size}" for dim, size in layout.sizes.items() if size > 1)
    return f"{layout.gpus} GPUs: {sizes or 'alone'}"
