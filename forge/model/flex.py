"""Attention that skips the blocks of scores which documents or a window hide, by torch's flex_attention.

Dong et al. 2024, "Flex Attention". With documents of d tokens in a sequence of s the work is about d / s of what it is
under a mask for `scaled_dot_product_attention`, and no (s, s) mask is kept. CUDA alone: on the CPU torch has no
backward pass for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from forge.config import ModelConfig
from forge.model.sequence import in_sight


def block_mask(config: ModelConfig, length: int, doc_ids: Tensor | None, device: torch.device) -> BlockMask:
    """Which keys each query of a whole sequence sees: not later ones, of its window, of its document.

    Args:
        length: tokens of the sequence.
        doc_ids: int64 (B, length).
    """

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = in_sight(q, k, config.sliding_window)
        return seen if doc_ids is None else seen & (doc_ids[b, q] == doc_ids[b, k])

    rows = None if doc_ids is None else doc_ids.shape[0]
    found: BlockMask = _compiled(create_block_mask, device)(visible, rows, None, length, length, device=device)
    return found


def flex_mix(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """softmax(scale q k^T) v over what the mask shows, (B, heads, S, d) of each; k and v may have fewer heads."""
    grouped = q.shape[1] != k.shape[1]
    mixed: Tensor = _compiled(flex_attention, q.device)(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return mixed


def _compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """On CUDA the function compiled, without which it would make all scores; inside compiled code it is already."""
    return function if device.type != "cuda" or torch.compiler.is_compiling() else _compile_once(function)


@cache
def _compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
