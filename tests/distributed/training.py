"""Six steps of a tiny model in any layout, on random packed documents with unequal target counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attrs import evolve
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.config import (
    AdamW,
    Constant,
    DistributedConfig,
    JobConfig,
    ModelConfig,
    MoEConfig,
    NoSchedule,
    ScheduleFree,
    TrainConfig,
)
from forge.data.batch import IGNORE, Batch
from forge.distributed.pipeline import gather_stages
from forge.pytree import tree_leaves, tree_map
from forge.training.average import params_to_use
from forge.training.parts import build_parts, initial_state, step_for
from forge.training.runtime import Runtime, open_runtime

SEQ, GLOBAL, MICRO, VOCAB = 16, 8, 1, 36
MODEL = ModelConfig(
    dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, max_seq_len=SEQ, qk_norm=True, init_std=0.1,
    ffn_hidden_dim=48,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=6, seq_len=SEQ, global_batch_size=GLOBAL, micro_batch_size=MICRO, grad_clip_norm=0.5, z_loss_weight=1e-3
)
JOB = JobConfig(model=MODEL, train=TRAIN, optimizer=AdamW(lr=1e-2), scheduler=Constant(warmup_steps=2))
MOE = evolve(MODEL, moe=MoEConfig(n_experts=4, top_k=2, n_shared_experts=1, expert_hidden_dim=16, router="sigmoid",
                                  bias_update_rate=0.01, aux_loss_weight=0.01))  # fmt: skip


class Curve(NamedTuple):
    """What a layout made of six steps."""

    losses: list[float]
    norms: list[float]
    tokens: int
    start: dict[str, Tensor]  # whole
    params: dict[str, Tensor]  # whole


FREE = evolve(JOB, optimizer=ScheduleFree(lr=1e-2), scheduler=NoSchedule())
AVERAGED = evolve(JOB, train=evolve(TRAIN, ema_decay=0.8))


def global_batch(step: int) -> Batch:
    """GLOBAL packed sequences with a third of the labels ignored, unevenly, as (1, GLOBAL, SEQ)."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (1, GLOBAL, SEQ), generator=generator)
    labels = torch.randint(0, VOCAB, ids.shape, generator=generator)
    share = torch.linspace(0, 0.9, GLOBAL).view(1, -1, 1)
    labels[torch.rand(ids.shape, generator=generator) < share] = IGNORE
    doc_ids = (torch.rand(ids.shape, generator=generator) < 0.15).cumsum(-1)
    return Batch(ids, labels, doc_ids)


def local_batch(batch: Batch, rank: int, ranks: int, micro: int) -> Batch:
    """Data rank's share as (A, micro, SEQ)."""
    return tree_map(lambda x: x[0].chunk(ranks)[rank].unflatten(0, (-1, micro)), batch)


def whole(tensor: Tensor) -> Tensor:
    """The tensor in full."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(job: JobConfig, layout: dict[str, Any] | None = None) -> Curve:
    """Six steps in this process's layout; every rank returns the same."""
    job = evolve(job, distributed=DistributedConfig(**(layout or {})))
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state = initial_state(job, parts)
        start = gathered(state.params, runtime)
        step_at = step_for(job, parts)
        losses, norms = [], []
        for n in range(job.train.steps):
            step, state = step_at(n, state)
            batch = local_batch(global_batch(n), runtime.data_rank, runtime.data_ranks, job.train.micro_batch_size)
            state, result = step(state, batch)
            losses.append(float(result.loss))
            norms.append(float(result.grad_norm))
        return Curve(losses, norms, int(state.tokens), start, gathered(state.params, runtime))


def evaluate(job: JobConfig, count: int | None = None) -> list[float]:
    """Held-out losses after each of three updates, under the average that schedule-free evaluates.

    The held-out sequences are this rank's share, or the first `count` of it; the parameters in training stay.
    """
    with open_runtime(job) as runtime:
        parts = build_parts(job, runtime)
        state = initial_state(job, parts)
        step_at = step_for(job, parts)
        share = runtime.data_rank, runtime.data_ranks, 1
        held_out = tree_map(lambda x: x[:count], local_batch(global_batch(9), *share))
        losses = []
        for n in range(3):
            step, state = step_at(n, state)
            state, _ = step(state, local_batch(global_batch(n), *share))
            average = params_to_use(parts.optimizer, state)
            before = [whole(p) for p in tree_leaves(state.params)]
            sums = parts.eval_step(average, state.extras, held_out)
            assert all(torch.equal(a, whole(b)) for a, b in zip(before, tree_leaves(state.params), strict=True))
            losses.append(float(sums.ce) / int(sums.tokens))
        return losses


def gathered(params: dict[str, Tensor], runtime: Runtime) -> dict[str, Tensor]:
    """Every parameter in full, of every pipeline stage, on every rank."""
    if runtime.mesh is not None and runtime.mesh.size("pp") > 1:
        params = gather_stages(params, runtime.mesh)
    return {name: whole(p) for name, p in params.items()}
