"""Functional sharding: parameters as plain local shards, gathered and reduced by functions that can be differentiated.

FSDP2 gathers by hooks on modules, which `torch.func` does not see. Here gathering is a function of the shards whose
derivative is a reduce-scatter, and `recomputed` forgets what it gathered until the derivative asks for it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as torch_pytree

from forge.distributed.mesh import DIMS, Mesh
from forge.errors import ConfigError
from forge.pytree import PyTree, tree_leaves


@frozen
class ShardLayout:
    """How whole parameters lie over ranks: cut along their first dimension, in the parts that FSDP2 makes.

    Rank r of R holds rows r n to (r + 1) n of `rows`, n = ceil(rows / R); the last ranks may hold fewer, or none.
    """

    shapes: dict[str, torch.Size]  # of the whole parameters, by fully-qualified name
    mesh: DeviceMesh  # of one dimension

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the parameters together."""
        return self.mesh.get_group()

    @property
    def ranks(self) -> int:
        """How many parts there are."""
        return self.mesh.size()

    def slice_of(self, name: str) -> slice:
        """The rows of a whole parameter that this rank holds."""
        rows, rank = self.shapes[name][0], self.mesh.get_local_rank()
        begin, end = (min(rows, place * -(-rows // self.ranks)) for place in (rank, rank + 1))
        return slice(begin, end)


def shard_layout(model: nn.Module, mesh: Mesh) -> ShardLayout:
    """The layout of a model's parameters over the ranks of dp_shard.

    Raises:
        ConfigError: another dimension of the mesh has more than one rank.
    """
    for dim in DIMS:
        if dim != "dp_shard" and mesh.size(dim) > 1:
            raise ConfigError(
                f"distributed.{dim} = {mesh.size(dim)} does not go with functional sharding, which cuts over dp_shard"
                f" alone: set distributed.{dim} = 1, or build the seam with build_sharded_value_and_grad"
            )
    return ShardLayout({name: p.shape for name, p in model.named_parameters()}, mesh.root["dp_shard"])


def shard_params(params: Mapping[str, Tensor], layout: ShardLayout) -> dict[str, Tensor]:
    """This rank's shards of whole parameters that every rank has; copies, so that the whole ones can be freed."""
    return {name: p[layout.slice_of(name)].clone() for name, p in params.items()}


def whole_params(shards: Mapping[str, Tensor], layout: ShardLayout) -> dict[str, Tensor]:
    """Inverse of `shard_params`, and differentiable. Every rank must call it together.

    The gradient that comes back to a shard is the sum of those that the ranks have of the whole parameter, in fp32.
    """
    return gather(shards, layout, next(iter(shards.values())).dtype)


def as_dtensors(shards: Mapping[str, Tensor], layout: ShardLayout) -> dict[str, Tensor]:
    """The shards as FSDP2 would hold them, sharing their storage, for what works on DTensors: Muon, checkpoints."""
    whole = {name: torch.empty(layout.shapes[name], device="meta") for name in shards}
    return {
        name: DTensor.from_local(
            shard, layout.mesh, (Shard(0),), run_check=False, shape=whole[name].shape, stride=whole[name].stride()
        )
        for name, shard in shards.items()
    }


def gather(shards: Mapping[str, Tensor], layout: ShardLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    """`whole_params` in one message of a given dtype."""
    rows = tuple(layout.shapes[name][0] for name in shards)
    return dict(zip(shards, _Linear.apply(_Map(True, layout.group, rows, dtype), *shards.values()), strict=True))


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, out of place and under `torch.func`.

    Its derivative is the identity: the sum is one number that all ranks share, and each differentiates its own part.
    """
    summed: Tensor = _AllReduce.apply(tensor, group)
    return summed


def build_shard_norm(layout: ShardLayout) -> Callable[[PyTree], Tensor]:
    """The global 2-norm over the shards of all ranks, fp32 (), the same on every rank; also under `torch.func`."""

    def norm(tree: PyTree) -> Tensor:
        squares = [torch.linalg.vector_norm(leaf, dtype=torch.float32).square() for leaf in tree_leaves(tree)]
        return all_reduce(torch.stack(squares).sum().double(), layout.group).sqrt().float()

    return norm


@frozen
class _Map:
    """One of two linear maps, each the other's transpose: shards -> whole tensors, and back with a sum over ranks."""

    to_whole: bool
    group: dist.ProcessGroup
    rows: tuple[int, ...]  # of each whole tensor
    dtype: torch.dtype  # of what comes out

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (_all_gather if self.to_whole else _reduce_scatter)(self, tensors)


def _all_gather(to: _Map, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
    ranks = to.group.size()
    padded = [_padded(shard, -(-rows // ranks)) for shard, rows in zip(shards, to.rows, strict=True)]
    sent = torch.cat([part.to(to.dtype).flatten() for part in padded])
    received = sent.new_empty(ranks, sent.numel())
    dist.all_gather_single(received.view(-1), sent, group=to.group)
    columns = received.split([part.numel() for part in padded], dim=1)
    return tuple(
        column.reshape(-1, *part.shape[1:])[:rows] for column, part, rows in zip(columns, padded, to.rows, strict=True)
    )


def _reduce_scatter(to: _Map, wholes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Summed in fp32 at least."""
    ranks, rank = to.group.size(), to.group.rank()
    heights = [-(-rows // ranks) for rows in to.rows]
    wide = torch.promote_types(to.dtype, torch.float32)
    padded = [_padded(whole, ranks * height) for whole, height in zip(wholes, heights, strict=True)]
    sent = torch.cat([part.to(wide).reshape(ranks, -1) for part in padded], dim=1)
    received = sent.new_empty(sent.shape[1])
    dist.reduce_scatter_single(received, sent.view(-1), group=to.group)
    parts = received.split([part.numel() // ranks for part in padded])
    return tuple(
        part.view(height, *whole.shape[1:])[: max(0, rows - rank * height)].to(to.dtype)
        for part, whole, height, rows in zip(parts, wholes, heights, to.rows, strict=True)
    )


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


class _Linear(Function):
    """A `_Map` and its derivatives, of any order and in both modes; a mapped dimension is carried as the last one."""

    @staticmethod
    def forward(to: _Map, *tensors: Tensor) -> tuple[Tensor, ...]:
        return to(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.to, ctx.back = inputs[0], evolve(inputs[0], to_whole=not inputs[0].to_whole, dtype=inputs[1].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = [place for place, need in enumerate(ctx.needs_input_grad[1:]) if need]
        back = evolve(ctx.back, rows=tuple(ctx.back.rows[place] for place in needed))
        found = dict(zip(needed, _Linear.apply(back, *(grads[place] for place in needed)), strict=True))
        return None, *(found.get(place) for place in range(len(grads)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        moved: tuple[Tensor, ...] = _Linear.apply(ctx.to, *tangents)
        return moved

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], to: _Map, *tensors: Tensor) -> tuple[Any, Any]:
        dims = in_dims[1:]
        moved = [t if dim is None else t.movedim(dim, -1) for t, dim in zip(tensors, dims, strict=True)]
        out_dims = tuple(None if dim is None else t.dim() - 1 for t, dim in zip(moved, dims, strict=True))
        return _Linear.apply(to, *moved), out_dims


class _AllReduce(Function):
    @staticmethod
    def forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return all_reduce(tangent, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
        return all_reduce(tensor, group), in_dims[0]


def recomputed(fn: Callable[..., Any], *args: PyTree) -> Any:
    """`fn(*args)`, keeping nothing but the arguments: whatever derivative is asked for, `fn` is computed again.

    What `torch.utils.checkpoint` does, by a function that goes through `torch.func` and can be differentiated again.

    Args:
        fn: pure; it must meet every tensor that it differentiates or maps over in its arguments.
        args: pytrees of tensors, and of anything else, which is passed on.
    """
    leaves, structure = torch_pytree.tree_flatten(args)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    made: list[Callable[[Sequence[Tensor]], Any]] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        out, out_structure = torch_pytree.tree_flatten(
            fn(*torch_pytree.tree_unflatten(_filled(rest, places, tensors), structure))
        )
        out_places = [place for place, leaf in enumerate(out) if isinstance(leaf, Tensor)]
        out_rest = [None if isinstance(leaf, Tensor) else leaf for leaf in out]
        made[:] = [lambda found: torch_pytree.tree_unflatten(_filled(out_rest, out_places, found), out_structure)]
        return tuple(out[place] for place in out_places)

    found = _Recomputed.apply(flat, *(leaves[place] for place in places))
    return made[0](found)


def _filled(values: Sequence[Any], places: Sequence[int], given: Sequence[Any]) -> list[Any]:
    filled = list(values)
    for place, value in zip(places, given, strict=True):
        filled[place] = value
    return filled


class _Recomputed(Function):
    """fn(*inputs). Its derivatives are functions of the inputs, recomputed in the same way."""

    @staticmethod
    def forward(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return fn(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.fn, ctx.smooth = inputs[0], [out.is_floating_point() for out in output]
        ctx.mark_non_differentiable(*(out for out in output if not out.is_floating_point()))
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        places = [place for place, need in enumerate(needed) if need]
        incoming = [grad for grad, smooth in zip(grads, ctx.smooth, strict=True) if smooth]
        found = _Recomputed.apply(partial(_pulled_back, ctx.fn, places, len(inputs)), *inputs, *incoming)
        return None, *_filled([None] * len(inputs), places, found)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        moving = [t is not None and x.is_floating_point() for x, t in zip(inputs, tangents, strict=True)]
        places = [place for place, moves in enumerate(moving) if moves]
        push = partial(_pushed_forward, ctx.fn, places, len(inputs))
        found = iter(_Recomputed.apply(push, *inputs, *(tangents[place] for place in places)))
        return tuple(next(found) if smooth else None for smooth in ctx.smooth)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], fn: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Any]:
        mapped = torch.func.vmap(fn, in_dims=in_dims[1:], randomness=info.randomness)
        outputs = _Recomputed.apply(mapped, *inputs)
        return outputs, (0,) * len(outputs)


def _pulled_back(fn: Callable[..., Any], places: list[int], count: int, *args: Tensor) -> tuple[Tensor, ...]:
    """Of inputs and incoming gradients: the gradients in the inputs at `places`."""
    varied = [args[place] for place in places]
    pull_back = torch.func.vjp(partial(_smooth_part, fn, places, args[:count]), *varied)[1]
    grads: tuple[Tensor, ...] = pull_back(args[count:])
    return grads


def _pushed_forward(fn: Callable[..., Any], places: list[int], count: int, *args: Tensor) -> tuple[Tensor, ...]:
    """Of inputs and tangents of those at `places`: the tangents of the outputs.

    With grad mode on, in which torch chooses formulas of derivatives that can be differentiated again.
    """
    varied = tuple(args[place] for place in places)
    smooth = partial(_smooth_part, fn, places, args[:count])
    with torch.enable_grad():
        tangents: tuple[Tensor, ...] = torch.func.jvp(smooth, varied, args[count:])[1]
    return tangents


def _smooth_part(
    fn: Callable[..., Any], places: list[int], inputs: tuple[Tensor, ...], *varied: Tensor
) -> tuple[Tensor, ...]:
    return tuple(out for out in fn(*_filled(inputs, places, varied)) if out.is_floating_point())
