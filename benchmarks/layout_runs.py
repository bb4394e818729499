"""What one rank of a layout does and measures: messages, peak memory, and turns against a hand-written FSDP2 loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from benchmarks.peers import plain_adamw
from benchmarks.step import AGREEMENT_STEPS
from benchmarks.traffic import TrafficCounter
from forge.config import AdamW, DistributedConfig, JobConfig, ModelConfig, MoEConfig, NoSchedule, TrainConfig
from forge.data.batch import Batch
from forge.distributed.parallelize import materialize
from forge.metrics import get_memory_stats, reset_peak_memory
from forge.model import build_model
from forge.training.loss import build_loss_fn
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.runtime import Runtime, open_runtime

SHAPE = ModelConfig(dim=256, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=4096, max_seq_len=128)
EXPERTS = evolve(SHAPE, moe=MoEConfig(n_experts=8, n_shared_experts=1, expert_hidden_dim=256))
LARGE = evolve(SHAPE, dim=768, n_layers=6, vocab_size=8192)
"""52 M parameters: 200 MiB in fp32."""
GIB = 2**30


def job_of(model: ModelConfig, layout: dict[str, Any], *, micro_batch: int = 2) -> JobConfig:
    """Eight sequences an update, in fp32 on CPUs."""
    return JobConfig(
        model=model,
        train=TrainConfig(
            steps=1000, seq_len=model.max_seq_len, global_batch_size=8, micro_batch_size=micro_batch, device="cpu",
            precision="fp32",
        ),
        optimizer=AdamW(),
        scheduler=NoSchedule(),
        distributed=DistributedConfig(**layout),
    )  # fmt: skip


class Measured(NamedTuple):
    """One rank of one layout."""

    pp_rank: int
    sent: dict[str, float]  # bytes of one step, by kind
    initial: int  # bytes of tensors at the peak of building model and state
    peak: int  # bytes of tensors at the peak of that and two steps
    resident: float  # bytes that the process grew by at most, over all of it


def measure(config: JobConfig) -> Measured:
    """Build a model and its state, take two steps, and count."""
    gc.collect()
    reset_peak_memory("cpu")
    before = get_memory_stats("cpu")["allocated_gb"]
    with open_runtime(config) as runtime:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
            parts = build_parts(config, runtime)
            state = initial_state(config, parts)
        step_at, data = step_for(config, parts), batches(config, runtime.data_rank, runtime.data_ranks)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as stepping:
            step, state = step_at(0, state)
            state, _ = step(state, next(data))
        grown = (get_memory_stats("cpu")["peak_gb"] - before) * GIB
        with TrafficCounter() as counter:
            step(state, next(data))
        pp_rank = runtime.mesh.rank("pp") if runtime.mesh else 0
    start, initial = _allocated(building)
    _, peak = _allocated(stepping)
    sent = {kind: size for kind, size in counter.sent.items() if size}
    return Measured(pp_rank, sent, initial - start, max(initial, peak) - start, grown)


def _allocated(recorded: profile) -> tuple[int, int]:
    """Bytes of tensors on the CPU before the first allocation of a recording, and at its peak; torch's own count."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = list(_walk(recorded.profiler.kineto_results.experimental_event_tree()))
    found = [event.extra_fields for event in events if event.tag.name == "Allocation"]
    return found[0].total_allocated - found[0].alloc_size, max(event.total_allocated for event in found)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


def batches(config: JobConfig, rank: int, ranks: int) -> Iterator[Batch]:
    """A data rank's share of the same few global batches of random tokens, over and over, as (A, B, S)."""
    train, generator = config.train, torch.Generator().manual_seed(0)
    shape = (4, train.global_batch_size, train.seq_len)
    ids = torch.randint(config.model.vocab_size, shape, generator=generator)
    shares = ids.chunk(ranks, dim=1)[rank].unflatten(1, (-1, train.micro_batch_size))
    labels = shares.roll(-1, dims=-1)
    return cycle([Batch(shares[n], labels[n]) for n in range(len(ids))])


class Turns(NamedTuple):
    """Seconds an update of each turn, and what the first updates' losses were."""

    forge: list[float]
    plain: list[float]
    losses: list[tuple[float, float]]  # forge, plain


def take_turns(config: JobConfig, steps: int, repeats: int) -> Turns:
    """forge's step and a hand-written FSDP2 loop on the same module, alternating, after their losses were compared."""
    with open_runtime(config) as runtime:
        sides = {"forge": _forge_step(config, runtime), "plain": _plain_step(config, runtime)}
        losses = [(sides["forge"](), sides["plain"]()) for _ in range(AGREEMENT_STEPS)]
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats + 1):
            for name, side in sides.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    side()
                dist.barrier()
                if turn:  # the first is a warm-up
                    seconds[name].append((time.perf_counter() - start) / steps)
    return Turns(seconds["forge"], seconds["plain"], losses)


def _forge_step(config: JobConfig, runtime: Runtime) -> Callable[[], float]:
    parts = build_parts(config, runtime)
    state, step_at, updates = initial_state(config, parts), step_for(config, parts), count()
    data = batches(config, runtime.data_rank, runtime.data_ranks)

    def step() -> float:
        nonlocal state
        train_step, ready = step_at(next(updates), state)
        state, result = train_step(ready, next(data))
        return float(result.loss)

    return step


def _plain_step(config: JobConfig, runtime: Runtime) -> Callable[[], float]:
    """What one writes by hand: fully_shard, loss, backward, clip_grad_norm_, fused AdamW; no accumulation."""
    ranks, train = runtime.world_size, config.train
    mesh = init_device_mesh("cpu", (ranks,))
    model = build_model(config.model)
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, config, runtime.device)
    optimizer = plain_adamw(model, config)
    loss_fn = build_loss_fn(train, config.model)
    data = batches(config, runtime.data_rank, runtime.data_ranks)
    assert train.grad_clip_norm is not None and config.accumulation_steps(ranks) == 1

    def step() -> float:
        batch = next(data).micro(0)
        labels = batch.labels

        def mean_loss(hidden: Tensor, weight: Tensor, _: list[Any]) -> Tensor:
            return loss_fn(hidden, weight, labels, None).total / labels.numel()

        loss: Tensor = model(batch.input_ids, output=mean_loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip_norm or 0.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = loss.detach()
        dist.all_reduce(shown)
        return float(shown) / ranks

    return step
