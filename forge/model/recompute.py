"""Activation checkpointing and compilation of the blocks, from outside and without a change of names."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from forge.model.transformer import Transformer


def apply_activation_checkpointing(model: Transformer) -> None:
    """Keep only each block's input and compute the block again in the backward pass.

    The model has no randomness in its forward pass, so no RNG state is kept either.
    """
    for block in model.blocks.children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: Transformer) -> None:
    """torch.compile each block in place; blocks of one shape share the compiled code. After checkpointing."""
    for block in model.blocks.children():
        block.compile()
