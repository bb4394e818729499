"""What follows the tokens that a model has read, in any layout; every rank reads the same tokens, and gets the same."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from forge.distributed.mesh import Mesh
from forge.distributed.pipeline import Stages
from forge.distributed.shards import local_part
from forge.model import Transformer
from forge.model.block import BlockOutput
from forge.model.cache import Cache
from forge.model.head import head_logits
from forge.model.moe import without_capacity
from forge.model.recompute import is_compiled
from forge.pytree import PyTree
from forge.training.extras import router_bias
from forge.training.grad_sharded import lent

Read = Callable[[Tensor, Cache], Tensor]
"""(unread int64 (B, S), what was kept of the tokens before) -> fp32 logits (B, V) of the token that follows each row.

The cache then counts the unread tokens as read.
"""


@contextmanager
def open_reader(
    model: Transformer | Stages,
    params: dict[str, Tensor],
    extras: PyTree,
    *,
    mesh: Mesh | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Generator[Read, None, None]:
    """A `Read` for as long as the context lasts; with a mesh, every rank must call it together.

    FSDP2 gathers one block at a time; tensor-parallel ranks keep the keys and values of their own heads; pipeline
    stages take turns. Experts take every token, whatever their capacity: what a row gets must not depend on the others.

    Args:
        model: whole, or this rank's part of one as `parallelize` made it.
        params: those to read with; ones that the module does not hold are lent to it.
        extras: the state's, for the routers' biases.
        compute_dtype: of the forward pass.
    """
    with without_capacity(model), _eagerly(model):
        if mesh is None:
            assert isinstance(model, Transformer)
            computed = {name: p.to(compute_dtype) for name, p in params.items()}
            yield torch.no_grad()(partial(_read_alone, model, computed, extras))
            return
        with torch.no_grad(), lent(model, dict(model.named_parameters()), params):
            yield torch.no_grad()(partial(_read_together, model, extras, mesh, compute_dtype))


def _read_alone(model: Transformer, params: dict[str, Tensor], extras: PyTree, unread: Tensor, cache: Cache) -> Tensor:
    def output(hidden: Tensor, weight: Tensor, _: list[BlockOutput]) -> Tensor:
        return head_logits(hidden[:, -1], weight, model.config.logit_softcap)

    logits: Tensor = functional_call(model, params, (unread,), {"output": output, "past": cache, **router_bias(extras)})
    cache.advance(unread.shape[1])
    return logits


def _read_together(
    model: Transformer | Stages, extras: PyTree, mesh: Mesh, dtype: torch.dtype, unread: Tensor, cache: Cache
) -> Tensor:
    """Stage after stage; the last rank of all, which is in the last stage, tells everybody the logits."""
    config, tokens, tp = model.config, unread.shape[1], mesh.size("tp")
    ids = F.pad(unread, (0, -tokens % tp))  # tensor parallelism cuts the sequence evenly; nobody sees what is added
    stages = model.transformers if isinstance(model, Stages) else [model]
    indices, count = (model.indices, model.count) if isinstance(model, Stages) else ((0,), 1)
    group = mesh.group("pp")
    logits = torch.empty(ids.shape[0], config.vocab_size, device=ids.device)

    def output(x: Tensor, weight: Tensor, _: list[BlockOutput]) -> Tensor:
        if not weight.shape[0]:
            return x.contiguous()
        return _whole_logits(
            head_logits(x[:, tokens - 1], local_part(weight), config.logit_softcap), mesh, config.vocab_size
        )

    for stage, index in zip(stages, indices, strict=True):
        hidden = None
        if index:
            hidden = torch.empty(ids.shape[0], ids.shape[1] // tp, config.dim, dtype=dtype, device=ids.device)
            dist.recv(hidden, group=group, group_src=(index - 1) % group.size())
        result = stage(ids, hidden=hidden, output=output, past=cache, **router_bias(extras))
        if index < count - 1:
            dist.send(result, group=group, group_dst=(index + 1) % group.size())
        else:
            logits = result
    cache.advance(tokens)
    dist.broadcast(logits, src=dist.get_world_size() - 1)
    return logits


def _whole_logits(rows: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
    """Logits (B, V) from those of this rank's rows of the head (B, V_local), of which the last rank may have fewer."""
    ranks = mesh.size("tp")
    if ranks == 1:
        return rows.contiguous()
    each = -(-vocab_size // ranks)
    padded = F.pad(rows, (0, each - rows.shape[1])).contiguous()
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=mesh.group("tp"))
    return torch.cat(parts, dim=1)[:, :vocab_size].contiguous()


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Blocks that are compiled, run as they are: each length of the cache would be compiled anew."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
