"""Where a model's parameters lie in a layout, and what a rank holds of them and makes of them, by calculation alone.

The rules are those of `forge/distributed/`, written down as arithmetic on shapes: no process is started, no process
group made. `tests/training/test_plan_layout.py` holds them against the parts that `build_parts` really makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from attrs import frozen

from forge.config import JobConfig
from forge.distributed.context_parallel import check_length
from forge.distributed.expert_parallel import check_experts
from forge.distributed.mesh import DATA_DIMS, mesh_sizes
from forge.distributed.parallelize import check_compile_scope
from forge.distributed.pipeline import check_pipeline, stage_layers, stages_a_rank
from forge.distributed.tensor_parallel import check_tensor_parallel
from forge.model import build_model
from forge.model.moe import check_expert_widths

Shape = tuple[int, ...]

_TP_DIMS = {
    "embed.weight": 0, "head.weight": 0,
    "wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wq.bias": 0, "wk.bias": 0, "wv.bias": 0, "wo.weight": 1,
    "w_up.weight": 0, "w_gate.weight": 0, "w_up.bias": 0, "w_gate.bias": 0, "w_down.weight": 1,
    "experts.w_up": 2, "experts.w_gate": 2, "experts.w_down": 1,
}  # fmt: skip
"""End of a parameter's name -> the dimension that tensor parallelism cuts; the others are whole on every rank."""


@frozen(slots=False)  # for the cached shapes
class Layout:
    """A config on a number of GPUs."""

    config: JobConfig
    sizes: dict[str, int]  # of forge.distributed.mesh.DIMS
    compute_dtype: torch.dtype
    param_dtype: torch.dtype

    @property
    def gpus(self) -> int:
        """Ranks of the whole job."""
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return math.prod(self.sizes[dim] for dim in DATA_DIMS)

    @property
    def accumulation(self) -> int:
        """Micro-batches an update."""
        return self.config.accumulation_steps(self.data_ranks)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of every parameter of the whole model, by name."""
        return {name: tuple(p.shape) for name, p in build_model(self.config.model).named_parameters()}

    def shard_ranks(self, name: str) -> int:
        """Ranks over which FSDP2 cuts a parameter; experts are dealt out over ep already."""
        dealt = self.sizes["ep"] if _is_expert(name) else 1
        return self.sizes["dp_shard"] * self.sizes["ep"] * self.sizes["cp"] // dealt

    def stages(self, pp_rank: int) -> list[dict[str, Shape]]:
        """The stages of a pipeline rank, each with its parameters' whole shapes; without a pipeline, the model."""
        ranks = self.sizes["pp"]
        count = ranks * stages_a_rank(self.config.distributed) if ranks > 1 else 1
        layers = stage_layers(self.config.model.n_layers, count)
        return [self._stage(index, layers) for index in range(pp_rank, count, ranks)]

    def _stage(self, index: int, layers: list[range]) -> dict[str, Shape]:
        first, last = index == 0, index == len(layers) - 1
        ends = {"position_embed.weight": first, "norm.weight": last, "norm.bias": last, "head.weight": last}
        ends["embed.weight"] = first or (last and self.config.model.tied_embeddings)
        held = {f"blocks.{layer}." for layer in layers[index]}
        return {
            name: shape for name, shape in self.shapes.items() if ends.get(name, f"{name[: _block_end(name)]}" in held)
        }

    def gathered_shape(self, name: str) -> Shape:
        """The part of a parameter that a rank computes with: cut over ep and tp, gathered over FSDP2's ranks."""
        shape = list(self.shapes[name])
        if _is_expert(name):
            shape[0] //= self.sizes["ep"]
        if self.is_cut_by_tp(name):
            dim = _TP_DIMS[_ending(name)]
            shape[dim] = -(-shape[dim] // self.sizes["tp"])
        return tuple(shape)

    def is_cut_by_tp(self, name: str) -> bool:
        """Whether tensor parallelism cuts a parameter; what it does not cut is whole on every one of its ranks."""
        return self.sizes["tp"] > 1 and _ending(name) in _TP_DIMS

    def pieces(self, name: str) -> int:
        """Into how many different parts a parameter is cut."""
        dealt = self.sizes["ep"] if _is_expert(name) else 1
        return dealt * (self.sizes["tp"] if self.is_cut_by_tp(name) else 1) * self.shard_ranks(name)

    def shard_dim(self, name: str) -> int:
        """The dimension that FSDP2 cuts: the first, but within experts where they are fewer than ranks."""
        shape, ranks = self.gathered_shape(name), self.shard_ranks(name)
        if len(shape) < 3 or shape[0] >= ranks:
            return 0
        return next((dim for dim in (1, 2) if shape[dim] % ranks == 0), 0)

    def local_shape(self, name: str, shard_rank: int = 0) -> Shape:
        """The part of a parameter that a rank stores.

        Args:
            shard_rank: place among the ranks (dp_shard, ep, cp) of FSDP2; the first has the most.
        """
        shape, dim, ranks = list(self.gathered_shape(name)), self.shard_dim(name), self.shard_ranks(name)
        if _is_expert(name):  # of which the ranks of ep have different ones
            ep, cp = self.sizes["ep"], self.sizes["cp"]
            shard_rank = shard_rank // (ep * cp) * cp + shard_rank % cp
        rows = -(-shape[dim] // ranks)
        begin, end = (min(shape[dim], place * rows) for place in (shard_rank, shard_rank + 1))
        shape[dim] = end - begin
        return tuple(shape)

    def padded_numel(self, name: str) -> int:
        """Numbers that FSDP2 sends to gather a parameter, or to reduce its gradient: of as many rows on every rank."""
        return math.prod(self.local_shape(name)) * self.shard_ranks(name)

    def groups(self, stage: Mapping[str, Shape]) -> dict[str, list[str]]:
        """What FSDP2 gathers together: a block, its experts under ep, and the rest of the model as ''."""
        found: dict[str, list[str]] = {}
        for name in stage:
            end = _block_end(name)
            key = name[:end] + ("mlp.experts" if end and _is_expert(name) and self.sizes["ep"] > 1 else "")
            found.setdefault(key, []).append(name)
        return found


def build_layout(config: JobConfig, gpus: int, compute_dtype: torch.dtype, param_dtype: torch.dtype) -> Layout:
    """A config on `gpus` ranks, after every check that a run of it makes.

    Raises:
        ConfigError: the run would be refused.
    """
    sizes = mesh_sizes(config.distributed, gpus)
    layout = Layout(config, sizes, compute_dtype, param_dtype)
    if sizes["cp"] > 1:
        check_length(config.train.seq_len, sizes["cp"])
    if sizes["ep"] > 1:
        check_experts(config.model.moe, sizes["ep"])
    if sizes["tp"] > 1:
        check_tensor_parallel(config, sizes["tp"])
    check_expert_widths(config.model, compute_dtype, sizes["tp"])
    check_compile_scope(config, gpus)
    if sizes["pp"] > 1:
        check_pipeline(config, layout.data_ranks)
    config.accumulation_steps(layout.data_ranks)
    return layout


def stated_gpus(config: JobConfig) -> int:
    """The ranks that the distributed section asks for where nobody says how many there are: -1 is one."""
    sizes = [getattr(config.distributed, dim) for dim in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")]
    return math.prod(abs(size) for size in sizes)


def layers_of(stage: Iterable[str]) -> list[int]:
    """The layers of which a stage has parameters."""
    return sorted({int(name.split(".")[1]) for name in stage if name.startswith("blocks.")})


def _ending(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _block_end(name: str) -> int:
    """Length of 'blocks.<n>.' in a parameter's name; 0 for one outside the blocks."""
    if not name.startswith("blocks."):
        return 0
    return name.index(".", len("blocks.")) + 1
