"""Context parallelism: every sequence is cut over ranks, and attention gathers the keys and values of all of them.

A sequence of 2 n equal chunks lies on n ranks, chunks r and 2 n - 1 - r on rank r: under the causal mask, every rank
then has the same number of keys to look at.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from forge.data.batch import Batch
from forge.distributed.mesh import Mesh
from forge.errors import ConfigError
from forge.model import Transformer
from forge.model.sequence import SequenceCut, take_chunks


def apply_context_parallel(model: Transformer, seq_len: int, mesh: Mesh) -> None:
    """Let the model read parts of sequences; nothing to do where the mesh does not cut them.

    Raises:
        ConfigError: a sequence cannot be cut evenly.
    """
    ranks = mesh.size("cp")
    if ranks > 1:
        check_length(seq_len, ranks)
        model.cut = build_sequence_cut(mesh.group("cp"))


def check_length(seq_len: int, ranks: int) -> None:
    """Refuse a sequence that has not two equal chunks for every rank.

    Raises:
        ConfigError: it has not.
    """
    if seq_len % (2 * ranks):
        below = seq_len - seq_len % (2 * ranks)
        remedy = f"{below} or {below + 2 * ranks}" if below else f"{2 * ranks}"
        raise ConfigError(
            f"train.seq_len = {seq_len} is not divisible by 2 x distributed.cp = {2 * ranks}, two chunks a rank:"
            f" make it {remedy}"
        )


def held_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Which of 2 * ranks equal chunks of a sequence a rank holds: one early, one late."""
    return rank, 2 * ranks - 1 - rank


def shard_sequence(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's part of every sequence; source ids belong to the whole of one and stay.

    Raises:
        ConfigError: the sequences cannot be cut evenly.
    """
    if ranks == 1:
        return batch
    check_length(batch.input_ids.shape[-1], ranks)

    def part(whole: Tensor) -> Tensor:
        return take_chunks(whole, held_chunks(rank, ranks), 2 * ranks, -1)

    doc_ids = None if batch.doc_ids is None else part(batch.doc_ids)
    return evolve(batch, input_ids=part(batch.input_ids), labels=part(batch.labels), doc_ids=doc_ids)


def build_sequence_cut(group: dist.ProcessGroup) -> SequenceCut:
    """What the model needs to know of this rank's place in the group that cuts its sequences."""
    ranks = group.size()
    held = [chunk for rank in range(ranks) for chunk in held_chunks(rank, ranks)]
    place = [held.index(chunk) for chunk in range(2 * ranks)]

    def gather(part: Tensor, dim: int) -> Tensor:
        by_rank = _AllGather.apply(part, group).unbind(0)
        chunks = [chunk for of_rank in by_rank for chunk in of_rank.chunk(2, dim)]
        return torch.cat([chunks[at] for at in place], dim)

    return SequenceCut(gather, held_chunks(group.rank(), ranks), 2 * ranks)


class _AllGather(torch.autograd.Function):
    """x of every rank, stacked by rank; backward sums what all ranks made of this rank's x."""

    @staticmethod
    def forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        stacked = x.new_empty(group.size(), *x.shape)
        dist.all_gather_single(stacked.flatten(0, 1), x.contiguous(), group=group)
        return stacked

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, dist.ProcessGroup], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_single(summed, grad.contiguous().flatten(0, 1), group=ctx.group)
        return summed, None
