"""Text from a model, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call

from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.model import Transformer
from forge.model.attention import KeyValue
from forge.model.block import BlockOutput
from forge.model.head import head_logits
from forge.pytree import PyTree
from forge.training.extras import router_bias


def generate(
    model: Transformer,
    params: dict[str, Tensor],
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    extras: PyTree | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 (B,), until `max_new_tokens` or all rows have met `stop_id`.

    Past `model.max_seq_len` the oldest half of the context is dropped and the rest is read again.

    Args:
        prompt: int64 (B, S), S >= 1.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens.
        top_p: keep the likeliest tokens that together reach this probability (Holtzman et al. 2020).
        extras: the state's, for the routers' biases.
        seed: of a generator of its own; the global RNG is not touched.

    Raises:
        ConfigError: an empty prompt or an impossible sampling parameter.
    """
    _check(prompt, temperature, top_k, top_p)
    config = model.config
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    context, unread = prompt[:, -config.max_seq_len :], prompt[:, -config.max_seq_len :]
    past = empty_cache(config, prompt.shape[0], params["embed.weight"])
    finished = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
    for _ in range(max_new_tokens):
        logits, past = next_logits(model, params, unread, past, extras)
        token = sample(logits, temperature, top_k, top_p, generator)
        if stop_id is not None:
            token = torch.where(finished, stop_id, token)
            finished = finished | (token == stop_id)
        yield token
        if finished.all():
            return
        context = torch.cat((context, token.unsqueeze(1)), dim=1)
        if context.shape[1] > config.max_seq_len:
            context = unread = context[:, -(config.max_seq_len // 2 or 1) :]
            past = empty_cache(config, prompt.shape[0], params["embed.weight"])
        else:
            unread = token.unsqueeze(1)


def empty_cache(config: ModelConfig, rows: int, like: Tensor) -> list[KeyValue]:
    """A cache that has seen nothing, in the dtype and on the device of `like`."""
    empty = like.new_empty(rows, config.kv_heads, 0, config.head_width)
    return [(empty, empty)] * config.n_layers


@torch.no_grad()
def next_logits(
    model: Transformer,
    params: dict[str, Tensor],
    unread: Tensor,
    past: list[KeyValue],
    extras: PyTree | None = None,
) -> tuple[Tensor, list[KeyValue]]:
    """Read int64 (B, S) after the cached tokens: fp32 logits (B, V) of the token that follows, and the new cache."""

    def output(hidden: Tensor, weight: Tensor, blocks: list[BlockOutput]) -> tuple[Tensor, list[KeyValue]]:
        logits = head_logits(hidden[:, -1], weight, model.config.logit_softcap)
        return logits, [block.cache for block in blocks if block.cache is not None]

    return functional_call(model, params, (unread,), {"output": output, "past": past, **router_bias(extras or {})})


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token a row, int64 (B,), from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # Relative to the largest: a tiny temperature divides to -inf, never to inf - inf.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = (logits / temperature).softmax(dim=-1)
    ordered, ids = probabilities.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep[:, top_k:] = False
    if top_p is not None:
        keep &= ordered.cumsum(dim=-1) - ordered < top_p  # the token that crosses the line is kept
    drawn = torch.multinomial(ordered * keep, 1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)


def _check(prompt: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ConfigError(f"prompt must be (batch, tokens) with at least one token, got {tuple(prompt.shape)}")
    if not temperature >= 0:
        raise ConfigError(f"temperature must be >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be >= 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], got {top_p}")
