"""What a rank sends to others in one step, by kind of message and by calculation.

Small things are counted too: `tests/distributed/test_plan.py` holds the sums to what real ranks send, byte for byte.
Exchanges between experts are those of even routing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from forge.config import Muon
from forge.training.optimizer.roles import parameter_role
from forge.training.plan_layout import Layout, layers_of

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point-to-point", "broadcast"]
_ALIKE = ("router.weight", "wo.bias", "w_down.bias")
"""Parameters whose whole gradient every tp rank makes by itself."""
REDUCED_ITEMSIZE = 4
"""Gradients are reduced in fp32, see `forge/distributed/fsdp.py`."""


class Message(NamedTuple):
    """A collective of a step, or a message to one rank, made `times` over."""

    kind: Kind
    whole: float  # bytes: gathered by all, or each rank's before a reduction, an exchange or a broadcast
    ranks: int
    times: int = 1


def ring_bytes(kind: Kind, whole: float, ranks: int) -> float:
    """Bytes that leave each of n ranks: N (n - 1) / n, and twice that for an all-reduce.

    N is what an all-gather ends with and the others begin with. It is the least possible, and what rings reach
    (Patarasuk & Yuan 2009, sec. 3; the factors of "bus bandwidth" in NCCL's tests). A broadcast down a chain, of which
    all but the last rank pass on N, costs as much on average. A message to one rank is sent whole.
    """
    if kind == "point-to-point":
        return whole
    return (2 if kind == "all-reduce" else 1) * whole * (ranks - 1) / ranks


def step_traffic(layout: Layout, pp_rank: int, learned: Collection[str]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by kind; of those that it sends at all.

    Args:
        learned: names of the parameters that get a gradient.
    """
    sent: dict[str, float] = defaultdict(float)
    for part in (_fsdp, _tensor, _context, _experts, _pipeline, _muon, _numbers):
        for message in part(layout, pp_rank, learned):
            sent[message.kind] += ring_bytes(message.kind, message.whole, message.ranks) * message.times
    return {kind: size for kind, size in sent.items() if size}


def _fsdp(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """ZeRO stage 3 (Rajbhandari et al. 2020, sec. 7.2.2), with accumulation.

    A block is gathered for the forward and again for the backward pass of each micro-batch; embedding, last norm and
    head once for both; a pipeline stage once for all micro-batches. Gradients are reduced once a step, in fp32, over
    the shards, and what is left of them over the replicas (HSDP: Zhao et al. 2023, sec. 3.2.2).
    """
    piped, itemsize = layout.sizes["pp"] > 1, layout.compute_dtype.itemsize
    for stage in layout.stages(pp_rank):
        for key, names in layout.groups(stage).items():
            ranks = layout.shard_ranks(names[0])
            gathers = 1 if piped else layout.accumulation * (2 if key else 1)
            yield Message("all-gather", itemsize * sum(map(layout.padded_numel, names)), ranks, gathers)
            reduced = REDUCED_ITEMSIZE * sum(layout.padded_numel(name) for name in names if name in learned)
            yield Message("reduce-scatter", reduced, ranks)
            yield Message("all-reduce", reduced / ranks, layout.sizes["dp_replicate"])


def _tensor(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """Tensor with sequence parallelism (Korthikanti et al. 2022, sec. 4.2.2), of B S D hidden states a micro-batch.

    A block gathers and scatters twice forward and twice backward. Computed again, it does so twice and once more: what
    follows its last product is not needed. The embedding scatters, the last norm gathers, and back. The loss reduces a
    maximum and four sums a token (Shoeybi et al. 2019, sec. 3), a layer of experts the weights of its k choices.
    Of what every tp rank holds whole, most gradients are reduced once a step: norms saw a share of the sequence each.
    """
    ranks, train, model = layout.sizes["tp"], layout.config.train, layout.config.model
    if ranks == 1:
        return
    tokens = _tokens(layout)
    hidden, micro = tokens * model.dim * layout.compute_dtype.itemsize, layout.accumulation
    again = train.activation_checkpointing != "none"
    for stage in layout.stages(pp_rank):
        blocks, ends = len(layers_of(stage)), ("embed.weight" in stage) + ("norm.weight" in stage)
        if "norm.weight" in stage and "embed.weight" in stage and layout.sizes["pp"] > 1:
            ends = 1  # of a tied matrix, the last stage's copy is the head's
        yield Message("all-gather", hidden, ranks, micro * (blocks * (6 if again else 4) + ends))
        yield Message("reduce-scatter", hidden, ranks, micro * (blocks * (5 if again else 4) + ends))
        if "norm.weight" in stage:
            yield Message("all-reduce", 4 * tokens, ranks, micro * 5)
        routed = sum(model.is_moe_layer(layer) for layer in layers_of(stage))
        yield Message("all-reduce", 4 * tokens * model.moe.top_k, ranks, micro * routed)
        itemsize = REDUCED_ITEMSIZE if micro > 1 or layout.sizes["pp"] > 1 else layout.compute_dtype.itemsize
        for name in stage:
            if name in learned and not layout.is_cut_by_tp(name) and not name.endswith(_ALIKE):
                yield Message("all-reduce", itemsize * math.prod(layout.shapes[name]), ranks)


def _context(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """Keys and values gathered by every rank (Llama 3, Dubey et al. 2024, sec. 3.3.2), their gradients scattered back.

    2 B S (kv heads) (head width) a block and micro-batch; document ids once, and in layers of experts the choices of
    all tokens.
    """
    ranks, model, train = layout.sizes["cp"], layout.config.model, layout.config.train
    if ranks == 1:
        return
    micro, times = layout.accumulation, 2 if train.activation_checkpointing != "none" else 1
    tokens = train.micro_batch_size * train.seq_len
    pairs = 2 * tokens * model.kv_heads // layout.sizes["tp"] * model.head_width * layout.compute_dtype.itemsize
    for stage in layout.stages(pp_rank):
        layers = layers_of(stage)
        yield Message("all-gather", pairs, ranks, micro * len(layers) * times)
        yield Message("reduce-scatter", pairs, ranks, micro * len(layers))
        routed = sum(model.is_moe_layer(layer) for layer in layers)
        yield Message("all-gather", 8 * tokens * model.moe.top_k, ranks, micro * routed * times)
        if layout.config.data.isolate_documents:
            yield Message("all-gather", 8 * tokens, ranks, micro)


def _experts(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """Each token to its k experts and back, forward and backward: 4 B S k D (Lepikhin et al. 2020, sec. 3.2).

    Before them the counts, 8 bytes an expert.
    """
    ranks, model = layout.sizes["ep"], layout.config.model
    if ranks == 1:
        return
    again = layout.config.train.activation_checkpointing != "none"
    rows = _tokens(layout) * model.moe.top_k * model.dim * layout.compute_dtype.itemsize
    for stage in layout.stages(pp_rank):
        layers = layout.accumulation * sum(model.is_moe_layer(layer) for layer in layers_of(stage))
        yield Message("all-to-all", rows, ranks, layers * (6 if again else 4))
        yield Message("all-to-all", 8 * model.moe.n_experts, ranks, layers * (2 if again else 1))


def _pipeline(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """B S D forward, and its gradient backward, over every boundary (Narayanan et al. 2021, sec. 3.2).

    TP ranks send their share of the sequence each. The two ranks that hold a tied matrix swap its gradients.
    """
    ranks, model = layout.sizes["pp"], layout.config.model
    if ranks == 1:
        return
    hidden = _tokens(layout) // layout.sizes["tp"] * model.dim * layout.compute_dtype.itemsize
    stages = layout.stages(pp_rank)
    ends = (pp_rank == 0) + (pp_rank == ranks - 1)
    yield Message("point-to-point", hidden, ranks, layout.accumulation * (2 * len(stages) - ends))
    if model.tied_embeddings and ends and "embed.weight" in learned:
        part = math.prod(layout.local_shape("embed.weight")) * layout.param_dtype.itemsize
        yield Message("point-to-point", part, ranks)


def _muon(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """Each hidden matrix gathered whole in fp32 by every rank of the stage, and its update broadcast by one.

    Experts that are cut along their own dimension only are whole already. See
    `forge/training/optimizer/muon_sharded.py`.
    """
    if not isinstance(layout.config.optimizer, Muon) or layout.gpus == 1:
        return
    stage_ranks = layout.gpus // layout.sizes["pp"]
    for stage in layout.stages(pp_rank):
        for name, shape in stage.items():
            whole_experts = len(shape) == 3 and layout.shard_dim(name) == 0 and layout.sizes["tp"] == 1
            if name not in learned or parameter_role(name, len(shape)) != "hidden" or whole_experts:
                continue
            pieces = layout.pieces(name)
            yield Message("all-gather", 4 * math.prod(layout.local_shape(name)) * pieces, pieces)
            yield Message("broadcast", 4 * math.prod(shape), stage_ranks)


def _numbers(layout: Layout, pp_rank: int, learned: Collection[str]) -> Iterator[Message]:
    """Targets, five sums of losses, the routers' counts and two sums, the square of the norm: 8 bytes each."""
    if layout.gpus == 1:
        return
    model, pipes, tokens = layout.config.model, layout.sizes["pp"], layout.data_ranks * layout.sizes["cp"]
    routed = sum(model.is_moe_layer(layer) for layer in range(model.n_layers))
    sums = 8 * (5 + model.moe.n_experts * routed + (2 if routed else 0))
    yield from (Message("all-reduce", 8, tokens), Message("all-reduce", sums, tokens))
    yield from (Message("all-reduce", sums, pipes), Message("all-reduce", 8, layout.gpus))


def _tokens(layout: Layout) -> int:
    """Of a micro-batch, on one context-parallel rank."""
    return layout.config.train.micro_batch_size * layout.config.train.seq_len // layout.sizes["cp"]
