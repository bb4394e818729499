"""Activation checkpointing and compilation of the blocks, from outside and without a change of names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Literal

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge.model.moe import MoE
from forge.model.transformer import Transformer

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default, _aten._scaled_mm.default}
_KEPT = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _functional.reduce_scatter_tensor.default,
    _functional.all_to_all_single.default,
    _aten.max.default,  # the scale of an fp8 tensor: one number
}

Forward = Callable[..., Any]


def apply_activation_checkpointing(model: Transformer, mode: Literal["full", "selective"] = "full") -> None:
    """Keep only each block's input and compute the block again in the backward pass.

    `selective` keeps besides what is dear to compute again and small: what attention, collectives and every second
    matrix product returned (torchtitan's "op" policy). The model has no randomness in its forward pass, so no RNG state
    is kept.
    """
    wrap = _selective if mode == "selective" else _full
    for block in model.blocks.children():
        block.forward = wrap(block.forward)


# Functions of ours, which the compiler takes up together with the checkpoint in them: `checkpoint` alone, and a context
# function that is no global, it does not look into.


def _full(forward: Forward) -> Forward:
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return recomputed


def _selective(forward: Forward) -> Forward:
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts)

    return recomputed


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Those of one block's forward pass, and of the same operations computed again."""
    products = count(1)

    def policy(_: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = next(products) % 2 == 1 if op in _PRODUCTS else op in _KEPT
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, _Reuse(again)


class _Reuse(TorchDispatchMode):
    """Hands out what was kept. Torch's own mode wants every other operation to be the same again too.

    Gathering parameters, which FSDP2 does for experts inside a block, is not when it happens in the backward pass.
    """

    def __init__(self, kept: TorchDispatchMode) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's own."""
        return True

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in _PRODUCTS or op in _KEPT:
            return self._kept.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **(kwargs or {}))


def compile_blocks(
    model: Transformer,
    *,
    experts: bool = True,
    lean: bool = False,
    cuda_graphs: bool = False,
    under_checkpoint: bool = False,
) -> None:
    """torch.compile each block in place; blocks of one shape share the compiled code. After checkpointing.

    Args:
        experts: compile their products too. Torch can in bf16 only; without them a block is compiled in two pieces,
            and one under activation checkpointing not at all, since a checkpoint takes whole blocks.
        lean: let C++ instead of Python call the kernels, which saves a twentieth of a small model's step on a CPU.
        cuda_graphs: replay the kernels as CUDA graphs; who calls the blocks copies what they return before the next
            replay writes over it (`build_value_and_grad`). On other devices torch leaves it at a warning.
        under_checkpoint: compile what a full checkpoint, applied afterwards, will call: with DTensors inside, as under
            tensor parallelism, torch cannot compile the checkpoint itself.
    """
    _prepare_for_compiling(model, experts)
    for block in model.blocks.children():
        if under_checkpoint:
            block.forward = torch.compile(block.forward)
        else:
            block.compile(options=_options(lean, cuda_graphs))


def compile_whole(model: Transformer, *, experts: bool = True, lean: bool = False, cuda_graphs: bool = False) -> None:
    """torch.compile all between the embedding and the head as one, in place; arguments as `compile_blocks`.

    Compiling takes as long as there are blocks, and calling them no longer costs anything; but with experts in fp32,
    around which each block is compiled in pieces. The embedding stays outside: the compiler's code would add up its
    gradient in an order that differs from run to run.
    """
    _prepare_for_compiling(model, experts)
    compiled = torch.compile(model.hidden_states, options=_options(lean, cuda_graphs))
    model.hidden_states = compiled  # type: ignore[method-assign]


def _prepare_for_compiling(model: Transformer, experts: bool) -> None:
    model.compiled = True
    for block in model.blocks.children():
        mlp = block.mlp
        if isinstance(mlp, MoE) and not experts:
            mlp.experts.forward = torch.compiler.disable(mlp.experts.forward)  # type: ignore[method-assign]


def _options(lean: bool, cuda_graphs: bool) -> dict[str, Any] | None:
    chosen = {"cpp_wrapper": lean, "triton.cudagraphs": cuda_graphs}
    return {key: True for key, holds in chosen.items() if holds} or None


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile_blocks` or `compile_whole` was here, or somebody compiled a module of it."""
    return any(
        module._compiled_call_impl is not None or (isinstance(module, Transformer) and module.compiled)
        for module in model.modules()
    )
