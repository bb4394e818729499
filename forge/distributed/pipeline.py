"""Pipeline parallelism: a model's layers dealt out over ranks, each holding one stage or several.

Stage s of P ranks lies on rank s mod P, so that with several stages a rank every rank has early and late layers. The
embedding is in the first stage, the last norm and the head in the last; a tied matrix is in both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge.config import DistributedConfig, JobConfig
from forge.distributed.mesh import Mesh
from forge.distributed.shards import as_sharded, local_data, sharded_norm, tree_whole
from forge.errors import ConfigError
from forge.model import Transformer

TIED = "embed.weight"
LOOPED = ("interleaved_1f1b", "zero_bubble")
"""Schedules that take several stages a rank."""


def stages_a_rank(config: DistributedConfig) -> int:
    """Stages that each pipeline rank holds."""
    if config.pp_virtual_stages is not None:
        return config.pp_virtual_stages
    return 2 if config.pp_schedule == "interleaved_1f1b" else 1


def stage_layers(n_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as evenly as can be.

    Layers that are left over go to the stages in the middle first, then to the first one: the last one has the head.
    """
    takers = [*range(1, stages - 1), 0][: n_layers % stages]
    layers, start = [], 0
    for stage in range(stages):
        end = start + n_layers // stages + (stage in takers)
        layers.append(range(start, end))
        start = end
    return layers


def check_pipeline(config: JobConfig, data_ranks: int) -> None:
    """Refuse a pipeline that its schedule cannot run.

    Args:
        data_ranks: ranks that read different sequences.

    Raises:
        ConfigError: too few layers or micro-batches, or a schedule that does not go with something else.
    """
    chosen, virtual = config.distributed, stages_a_rank(config.distributed)
    stages, schedule = chosen.pp * virtual, chosen.pp_schedule
    if virtual > 1 and schedule not in LOOPED:
        raise ConfigError(
            f"distributed.pp_virtual_stages = {virtual}, but pp_schedule = {schedule} has one stage a rank: choose"
            " interleaved_1f1b or zero_bubble, or leave pp_virtual_stages unset"
        )
    if config.model.n_layers < stages:
        raise ConfigError(
            f"model.n_layers = {config.model.n_layers} is fewer than the {stages} pipeline stages (distributed.pp ="
            f" {chosen.pp} x {virtual} a rank): lower distributed.pp or pp_virtual_stages"
        )
    if schedule == "zero_bubble":
        _check_split_backward(config)
    _check_micro_batches(config, config.accumulation_steps(data_ranks))


def _check_split_backward(config: JobConfig) -> None:
    """Refuse what cannot be run twice for one forward pass: for the gradient of the input, then of the weights."""
    if config.train.compile:
        problem = "which compiled blocks do not allow: set train.compile = false"
    elif config.train.activation_checkpointing == "selective":
        problem = "and selective recomputation hands out what it kept once: set train.activation_checkpointing = full"
    elif config.distributed.reshard_after_forward == "always":
        problem = "and needs the same gathered parameters twice: set distributed.reshard_after_forward = auto"
    else:
        return
    raise ConfigError(
        f"distributed.pp_schedule = zero_bubble splits the backward pass, {problem}, or choose interleaved_1f1b"
    )


def _check_micro_batches(config: JobConfig, micro_batches: int) -> None:
    ranks, schedule = config.distributed.pp, config.distributed.pp_schedule
    if schedule != "gpipe" and micro_batches < ranks:
        raise ConfigError(
            f"distributed.pp = {ranks} under pp_schedule = {schedule} needs at least {ranks} micro-batches an update,"
            f" and the batch gives {micro_batches}: lower train.micro_batch_size, raise train.global_batch_size, or"
            " choose pp_schedule = gpipe"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule in LOOPED and micro_batches % rounds:
        raise ConfigError(
            f"{micro_batches} micro-batches an update cannot be cut into {rounds} equal rounds for distributed.pp ="
            f" {ranks} under pp_schedule = {schedule}: make them a multiple of {ranks} by train.global_batch_size or"
            " train.micro_batch_size"
        )


class Stages(nn.ModuleList):
    """The stages that one rank holds, in order; parameters carry their names in the whole model."""

    def __init__(self, modules: list[Transformer], indices: tuple[int, ...], count: int) -> None:
        super().__init__(modules)
        self.indices = indices
        """Places of these stages in the pipeline."""
        self.count = count
        """Stages of the whole pipeline."""
        self.config = modules[0].config

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Every stage's own parameters by their names in the whole model."""
        for stage in self:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)

    @property
    def transformers(self) -> list[Transformer]:
        """The stages, typed."""
        return [cast(Transformer, stage) for stage in self]

    @property
    def holds_first(self) -> bool:
        """Whether the embedding is here."""
        return self.indices[0] == 0

    @property
    def holds_last(self) -> bool:
        """Whether the head is here."""
        return self.indices[-1] == self.count - 1


def build_stages(model: Transformer, config: JobConfig, mesh: Mesh) -> Stages:
    """The stages of this rank, cut from the whole model on the meta device, which stays as it is.

    Raises:
        ConfigError: see `check_pipeline`.
    """
    check_pipeline(config, mesh.data_ranks)
    ranks, virtual = mesh.size("pp"), stages_a_rank(config.distributed)
    count = ranks * virtual
    layers = stage_layers(config.model.n_layers, count)
    indices = tuple(mesh.rank("pp") + ranks * turn for turn in range(virtual))
    return Stages([_cut(copy.deepcopy(model), index, layers) for index in indices], indices, count)


def _cut(model: Transformer, index: int, layers: list[range]) -> Transformer:
    """Take away what other stages hold."""
    first, last = index == 0, index == len(layers) - 1
    for name in list(model.blocks):
        if int(name) not in layers[index]:
            del model.blocks[name]
    if not first:
        model.position_embed = None
        if not (last and model.config.tied_embeddings):
            model.embed = None
    if not last:
        model.norm = model.head = None
    return model


def sum_tied_gradients(grads: dict[str, Tensor], stages: Stages, mesh: Mesh) -> None:
    """Add up, in place, the gradients of the two copies of a tied matrix; the two ranks that hold them swap theirs.

    Both copies then take the same updates, and stay bitwise equal.
    """
    if not stages.config.tied_embeddings or TIED not in grads:
        return
    group = mesh.group("pp")
    peer = group.size() - 1 if stages.holds_first else 0
    mine = local_data(grads[TIED]).contiguous()
    other = torch.empty_like(mine)
    swap = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    grads[TIED] = as_sharded(mine + other, grads[TIED])


def build_pipeline_norm(stages: Stages, mesh: Mesh) -> Callable[[dict[str, Tensor]], Tensor]:
    """`sharded_norm` over all stages, a tied matrix counted once."""
    copy = TIED if stages.config.tied_embeddings and not stages.holds_first else ""

    def norm(grads: dict[str, Tensor]) -> Tensor:
        counted = {name: grad for name, grad in grads.items() if name != copy}
        nothing = torch.zeros((), device=next(stages.parameters()).device)  # a stage may be frozen altogether
        return sharded_norm([*counted.values(), nothing], mesh.stage_ranks)

    return norm


def gather_stages(params: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The parameters of every stage, in full, on every rank; all ranks must call it together."""
    group, device = mesh.group("pp"), next(iter(params.values())).device
    whole: dict[str, Tensor] = tree_whole(params)
    layouts: list[Any] = [None] * group.size()
    dist.all_gather_object(layouts, {name: (p.shape, p.dtype) for name, p in whole.items()}, group=group)
    gathered: dict[str, Tensor] = {}
    for rank, layout in enumerate(layouts):
        for name, (shape, dtype) in layout.items():
            if name in gathered:
                continue
            here = rank == group.rank()
            tensor = whole[name].contiguous() if here else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group_src=rank, group=group)
            gathered[name] = tensor
    return gathered
