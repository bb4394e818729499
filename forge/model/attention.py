"""Grouped-query attention over causal, windowed and document masks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.config import ModelConfig
from forge.model.norm import RMSNorm
from forge.model.rope import RotaryTable, apply_rope

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of the tokens seen so far, each (B, kv_heads, S, head_width)."""

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_mask(
    config: ModelConfig, queries: int, past: int, doc_ids: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which keys each query may see, bool (1 or B, 1, queries, past + queries); None = plain causal over one square.

    Args:
        queries: tokens that ask, at positions past .. past + queries - 1.
        past: tokens in the cache before them.
        doc_ids: int64 (B, queries); only with an empty cache.
    """
    if doc_ids is None and past == 0 and (config.sliding_window or queries) >= queries:
        return None
    query_at = torch.arange(past, past + queries, device=device).unsqueeze(1)
    key_at = torch.arange(past + queries, device=device)
    mask = key_at <= query_at
    if config.sliding_window is not None:
        mask = mask & (key_at > query_at - config.sliding_window)
    mask = mask[None, None]
    if doc_ids is not None:
        mask = mask & (doc_ids.unsqueeze(-1) == doc_ids.unsqueeze(-2)).unsqueeze(1)
    return mask


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v with rotary positions, grouped keys, and optional norms on the heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.query_heads, config.kv_heads, config.head_width
        qkv_bias = config.bias or config.qkv_bias
        self.wq = nn.Linear(config.dim, self.heads * self.width, bias=qkv_bias, device="meta")
        self.wk = nn.Linear(config.dim, self.kv_heads * self.width, bias=qkv_bias, device="meta")
        self.wv = nn.Linear(config.dim, self.kv_heads * self.width, bias=qkv_bias, device="meta")
        self.wo = nn.Linear(self.heads * self.width, config.dim, bias=config.bias, device="meta")
        self.q_norm = RMSNorm(self.width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.width, config.norm_eps) if config.qk_norm else None
        self.backend = config.attention_backend

    def forward(
        self, x: Tensor, rotary: RotaryTable | None, mask: Tensor | None, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue | None]:
        """x (B, S, dim) -> (B, S, dim), and the keys and values of past and present tokens where a past is given."""
        q = self.wq(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (self.kv_heads, self.width)).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = apply_rope(q, rotary), apply_rope(k, rotary)
        present = None
        if past is not None:
            k, v = present = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        with self._kernel():
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
            )
        return self.wo(mixed.transpose(1, 2).flatten(-2)), present

    def _kernel(self) -> AbstractContextManager[None]:
        return nullcontext() if self.backend == "auto" else sdpa_kernel(_BACKENDS[self.backend])
