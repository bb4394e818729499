"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from forge.errors import ConfigError, RunError
from forge.model.cache import Cache
from forge.training.reading import Read


@frozen
class Sampling:
    """How a token is drawn.

    Raises:
        ConfigError: an impossible value.
    """

    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest that together reach this probability (Holtzman et al. 2020)
    min_p: float | None = None  # keep those at least so likely, relative to the likeliest (Nguyen et al. 2024)

    def __attrs_post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k must be >= 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}")


def generate(
    read: Read,
    prompts: Sequence[Tensor],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    max_seq_len: int,
    seeds: Sequence[int] | None = None,
    stop_id: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 (B,), until `max_new_tokens` or all rows have met `stop_id`.

    A row is what it would be alone: shorter ones are padded on the left, and each draws from a generator of its own.
    Where a row grows past `max_seq_len` the oldest half of it is dropped, and everything is read again.

    Args:
        read: the model, see `open_reader`.
        prompts: int64 (S,) each, S >= 1, on one device.
        max_seq_len: most tokens that the model can look at.
        seeds: of each row; the global RNG is not touched. Unset = 0 for all.

    Raises:
        ConfigError: an empty prompt.
        RunError: logits that are not finite, from which nothing can be drawn.
    """
    context, padding = _side_by_side(prompts, max_seq_len)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds or [0] * len(prompts)]
    finished = torch.zeros_like(padding, dtype=torch.bool)
    unread, cache = context, _cache(padding)
    for made in range(max_new_tokens):
        logits = read(unread, cache)
        if not logits.amax(dim=-1).isfinite().all():
            raise RunError(f"logits are not finite after {made} tokens: take an earlier checkpoint of the run")
        draws = torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
        token = sample(logits, sampling, draws.to(logits.device))
        if stop_id is not None:
            token = torch.where(finished, stop_id, token)
            finished = finished | (token == stop_id)
        yield token
        if made + 1 == max_new_tokens or finished.all():
            return
        context = torch.cat((context, token.unsqueeze(1)), dim=1)
        full = context.shape[1] - padding > max_seq_len
        if context.shape[1] > max_seq_len and full.any():
            padding = torch.where(full, context.shape[1] - (max_seq_len // 2 or 1), padding)
            context, padding = _trimmed(context, padding)
            unread, cache = context, _cache(padding)
        else:
            unread = token.unsqueeze(1)


def _side_by_side(prompts: Sequence[Tensor], longest: int) -> tuple[Tensor, Tensor]:
    """The ends of the prompts as one (B, S), padded on the left, and how far each is, (B,)."""
    for prompt in prompts:
        if prompt.dim() != 1 or not prompt.numel():
            raise ConfigError(f"prompt must be a row of at least one token, got {tuple(prompt.shape)}")
    if not prompts:
        raise ConfigError("prompts must hold at least one prompt")
    width = min(longest, max(prompt.numel() for prompt in prompts))
    ends = [prompt[-width:] for prompt in prompts]
    padding = torch.tensor([width - end.numel() for end in ends], device=ends[0].device)
    return torch.stack([F.pad(end, (width - end.numel(), 0)) for end in ends]), padding


def _trimmed(context: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows without the places that are padding in all of them."""
    start = int(padding.min())
    return context[:, start:], padding - start


def _cache(padding: Tensor) -> Cache:
    return Cache(padding if bool(padding.any()) else None)


def sample(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """One token a row, int64 (B,), from logits (B, V) and numbers of [0, 1), fp64 (B,): equal draws, equal tokens."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Relative to the largest: a tiny temperature divides to -inf, never to inf - inf.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    ordered, ids = (logits / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        ordered = ordered * (torch.arange(ordered.shape[-1], device=ordered.device) < sampling.top_k)
        ordered = ordered / ordered.sum(dim=-1, keepdim=True)  # top_p is a share of what top_k has kept
    if sampling.top_p is not None:
        keep &= ordered.cumsum(dim=-1) - ordered < sampling.top_p  # the token that crosses the line is kept
    if sampling.min_p is not None:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    kept = (ordered * keep).double()
    reached = kept.cumsum(dim=-1)
    place = (reached <= draws.unsqueeze(-1) * reached[:, -1:]).sum(dim=-1)
    place = place.minimum((kept > 0).sum(dim=-1) - 1)  # where rounding put the draw on the end itself
    return ids.gather(-1, place.unsqueeze(-1)).squeeze(-1)
