"""A sequence cut over ranks, as the model sees it: which chunks are here, and how to get the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class SequenceCut(NamedTuple):
    """Where this rank's tokens lie in the whole sequence."""

    gather: Callable[[Tensor, int], Tensor]  # (this rank's part, its sequence dimension) -> the whole, differentiable
    chunks: tuple[int, ...]  # of `total` equal ones, those that this rank holds, in order
    total: int

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole that it has."""
        return take_chunks(whole, self.chunks, self.total, dim)

    def whole_length(self, length: int) -> int:
        """Tokens of the whole sequence, given those of a part."""
        return length * self.total // len(self.chunks)


def take_chunks(whole: Tensor, chunks: tuple[int, ...], total: int, dim: int) -> Tensor:
    """Those of `total` equal chunks along a dimension that are named, in the order of their naming."""
    pieces = whole.chunk(total, dim)
    return torch.cat([pieces[chunk] for chunk in chunks], dim)


def token_positions(length: int, past: int, cut: SequenceCut | None, device: torch.device) -> Tensor:
    """Places in the sequence of `length` tokens that follow `past` others, or that a cut left here; int64 (length,)."""
    if cut is None:
        return torch.arange(past, past + length, device=device)
    return cut.take(torch.arange(cut.whole_length(length), device=device), 0)


def in_sight(query_at: Tensor, key_at: Tensor, window: int | None) -> Tensor:
    """Whether a token is not later than another, and among the `window` latest up to that one; bool, broadcast."""
    seen = key_at <= query_at
    return seen if window is None else seen & (key_at > query_at - window)


def document_positions(doc_ids: Tensor, cut: SequenceCut | None = None) -> Tensor:
    """Places counted from the start of each document, for ids that change where one begins; int64 (B, S) -> (B, S)."""
    whole = doc_ids if cut is None else cut.gather(doc_ids, -1)
    at = torch.arange(whole.shape[-1], device=whole.device).expand_as(whole)
    begins = torch.nn.functional.pad(whole[..., 1:] != whole[..., :-1], (1, 0), value=True)
    positions = at - torch.where(begins, at, 0).cummax(-1).values
    return positions if cut is None else cut.take(positions, -1)
