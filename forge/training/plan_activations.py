"""What autograd keeps on one rank of a layout, counted on a model for one process of the rank's shapes."""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from forge.config import JobConfig, MoEConfig
from forge.distributed.pipeline import stages_a_rank
from forge.training.parts import build_parts
from forge.training.plan import countable, saved_bytes
from forge.training.plan_layout import Layout, layers_of
from forge.training.runtime import build_runtime


def in_flight(layout: Layout, pp_rank: int, *, head: bool = False) -> int:
    """Forward passes of one stage each that a pipeline rank holds the activations of, at most; at least an estimate.

    gpipe: all of them (Huang et al. 2019). 1f1b: as many as there are stages from here on (Narayanan et al. 2021, sec.
    2.2.1). interleaved_1f1b warms up with 2 (P - 1 - p) + (v - 1) P passes and makes one more (torch's
    `ScheduleInterleaved1F1B`, after Megatron-LM). zero_bubble: (2 v - 1) P, as measured.

    Args:
        head: of the stage with the loss alone. Under zero_bubble torch keeps its graphs to the end of the step: the
            losses hold them, and a backward pass in two halves frees only a part of them, which is not counted off.
    """
    ranks, virtual = layout.sizes["pp"], stages_a_rank(layout.config.distributed)
    schedule, passes = layout.config.distributed.pp_schedule, layout.accumulation * virtual
    if ranks == 1:
        return 1
    if head:
        return layout.accumulation if schedule in ("gpipe", "zero_bubble") else 1
    if schedule == "gpipe":
        return passes
    if schedule == "zero_bubble":
        return min(passes, (2 * virtual - 1) * ranks)
    if schedule == "interleaved_1f1b":
        return min(passes, 2 * (ranks - 1 - pp_rank) + (virtual - 1) * ranks + 1)
    return min(passes, ranks - pp_rank)


def twin_of_rank(layout: Layout) -> JobConfig:
    """A config for one process whose blocks have the shapes that a rank computes with under tp, cp and ep."""
    config, tp, cp = countable(layout.config), layout.sizes["tp"], layout.sizes["cp"]
    model = config.model
    moe = evolve(model.moe, expert_hidden_dim=model.expert_width // tp if model.moe.n_experts else None)
    narrow = evolve(
        model, n_heads=model.query_heads // tp, n_kv_heads=model.kv_heads // tp, head_dim=model.head_width,
        ffn_hidden_dim=max(1, model.ffn_width // tp), vocab_size=max(2, -(-model.vocab_size // tp)), moe=moe,
    )  # fmt: skip
    return evolve(config, model=narrow, train=evolve(config.train, seq_len=config.train.seq_len // cp))


@frozen
class Activations:
    """Bytes that autograd keeps of one micro-batch on one rank; an estimate where ranks share tokens or heads.

    They are counted on the twin. Two things differ from it. Under TP a rank keeps only its share of the sequence where
    nothing is gathered: the inputs of two norms a block (Korthikanti et al. 2022, sec. 4.2.2). Under CP it keeps keys,
    values and masks of the whole sequence.
    """

    dense: int  # of a block with an MLP
    routed: int  # of a block with experts
    computed: int  # of the one block that is being computed again, under activation checkpointing
    ends: int  # of embedding, last norm and loss
    mask: int  # of attention, for the whole sequence

    def of_rank(self, layout: Layout, pp_rank: int) -> int:
        """Of all the passes that a rank has begun and not yet gone back through."""
        stages, routed = layout.stages(pp_rank), layout.config.model.is_moe_layer
        passes, total = in_flight(layout, pp_rank), float(self.computed)
        for stage in stages:
            head = "norm.weight" in stage
            held = passes / len(stages)
            if head:
                held = max(held, in_flight(layout, pp_rank, head=True))
                total += self.ends * in_flight(layout, pp_rank, head=True)
            total += self.mask * held
            total += held * sum(self.routed if routed(layer) else self.dense for layer in layers_of(stage))
        return int(total)


def count_activations(layout: Layout) -> Activations:
    """Count them, on tensors without storage."""
    twin, config = twin_of_rank(layout), layout.config
    model, itemsize = twin.model, layout.compute_dtype.itemsize
    tokens = twin.train.micro_batch_size * twin.train.seq_len
    spared = int(tokens * model.dim * itemsize * (1 - 1 / layout.sizes["tp"]))  # of one tensor cut over the sequence
    others = 2 * tokens * model.kv_heads * model.head_width * itemsize * (layout.sizes["cp"] - 1)
    if layout.sizes["cp"] > 1:  # attention goes by chunks, whose outputs are kept beside all of them together
        others += tokens * model.query_heads * model.head_width * itemsize
    normed = 0
    if layout.sizes["tp"] > 1 and model.norm == "rmsnorm" and layout.compute_dtype == torch.float32:
        # a norm of plain tensors keeps x alone, one of DTensors on a CPU the normalised x besides
        normed = tokens * model.dim * itemsize - spared
        others += 2 * normed
        others += tokens * (model.query_heads + model.kv_heads) * model.head_width * itemsize * model.qk_norm
    plain = evolve(twin, train=evolve(twin.train, activation_checkpointing="none"))
    again = config.train.activation_checkpointing != "none"
    differs = -spared if again else others - 2 * spared
    first, dense = _block_bytes(twin, routed=False)
    routed = _block_bytes(twin, routed=True)[1] if model.moe.n_experts else 0
    computed = _block_bytes(plain, routed=bool(model.moe.n_experts))[1] + others - 2 * spared if again else 0
    mask = tokens * twin.train.seq_len if config.data.isolate_documents else 0
    return Activations(
        dense=dense + differs,
        routed=routed + differs,
        computed=computed,
        ends=first - dense - mask - spared + normed,
        mask=mask * layout.sizes["cp"],
    )


def _block_bytes(config: JobConfig, *, routed: bool) -> tuple[int, int]:
    """Kept of a model of one block, and of one block alone: what a second one adds."""
    moe = evolve(config.model.moe, frequency=1) if routed else MoEConfig()
    kept = []
    for layers in (1, 2):
        model, train = evolve(config.model, n_layers=layers, moe=moe), evolve(config.train, freeze=())
        job = evolve(config, model=model, train=train)
        kept.append(saved_bytes(job, build_parts(job, build_runtime(job))))
    return kept[0], kept[1] - kept[0]
