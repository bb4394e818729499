"""Grouped-query attention over causal, windowed and document masks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.config import JobConfig, ModelConfig
from forge.errors import ConfigError
from forge.model.cache import Keep
from forge.model.flex import BlockMask, block_mask, flex_mix
from forge.model.norm import RMSNorm
from forge.model.rope import RotaryTable, apply_rope
from forge.model.sequence import SequenceCut, in_sight

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

CUDA_KERNELS = ("efficient", "cudnn")
"""Backends that no other device has."""

Mask = Tensor | BlockMask
"""Bool (1 or B, 1, queries, keys), or the same by blocks for flex_attention."""


def check_attention_backend(config: JobConfig, device: torch.device) -> None:
    """Refuse kernels that the device lacks, and the one that takes no mask where a run needs masks.

    Raises:
        ConfigError: names the key.
    """
    backend = config.model.attention_backend
    if backend in CUDA_KERNELS and device.type != "cuda":
        raise ConfigError(f"model.attention_backend = {backend} needs CUDA, and this is a {device.type}: choose auto")
    if backend != "flash" or device.type != "cuda":
        return
    length = config.train.seq_len
    reasons = {
        "data.isolate_documents": config.data.isolate_documents,
        "model.sliding_window": (config.model.sliding_window or length) < length,
        "distributed.cp": config.distributed.cp > 1,
    }
    for key in (key for key, holds in reasons.items() if holds):
        raise ConfigError(
            f"model.attention_backend = flash takes no masks on CUDA, and {key} needs them: choose auto, or flex"
        )


def attention_mask(
    config: ModelConfig,
    positions: Tensor,
    past: int,
    doc_ids: Tensor | None,
    cut: SequenceCut | None = None,
    padding: Tensor | None = None,
) -> Mask | None:
    """Which keys each query may see; None = plain causal over one square.

    The keys are those of the cache and of the queries' own tokens, or of the whole sequence where it is cut.

    Args:
        positions: of the queries in the sequence, int64 (queries,).
        past: tokens in the cache before them.
        doc_ids: of the queries, int64 (B, queries); only with an empty cache.
        cut: how the sequence lies over ranks; only with an empty cache.
        padding: int64 (B,): keys at the start of each row that nobody may see but themselves.
    """
    queries = positions.shape[0]
    causal = cut is None and doc_ids is None and padding is None
    if causal and past == 0 and (config.sliding_window or queries) >= queries:
        return None
    if config.attention_backend == "flex" and positions.is_cuda and cut is None and past == 0 and padding is None:
        return block_mask(config, queries, doc_ids, positions.device)
    query_at = positions.unsqueeze(1)
    key_at = torch.arange(past + queries if cut is None else cut.whole_length(queries), device=positions.device)
    mask = in_sight(query_at, key_at, config.sliding_window)[None, None]
    if doc_ids is not None:
        key_ids = doc_ids if cut is None else cut.gather(doc_ids, -1)
        mask = mask & (doc_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)).unsqueeze(1)
    if padding is not None:  # a softmax over no key at all would not be a number
        mask = mask & ((key_at >= padding[:, None, None, None]) | (key_at == query_at))
    return mask


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, or with muP's scale; rotary positions, grouped keys, optional norms on the heads."""

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
        self.backend, self.scale = config.attention_backend, config.attention_scale

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        mask: Mask | None,
        keep: Keep | None = None,
        cut: SequenceCut | None = None,
    ) -> Tensor:
        """x (B, S, dim) -> (B, S, dim); with `keep`, over the tokens read before too."""
        q = self.wq(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = apply_rope(q, rotary), apply_rope(k, rotary)
        if keep is not None:
            k, v = keep(k, v)
        with self._kernel() if keep is None else nullcontext():  # with a cache there is a mask, and flash takes none
            mixed = self._mix(q, k, v, mask) if cut is None else self._mix_chunks(q, k, v, mask, cut)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        if isinstance(mask, BlockMask):
            return flex_mix(q, k, v, mask, self.scale)
        grouped = self.heads != self.kv_heads
        if grouped and mask is not None and q.is_cuda:  # the one fast kernel that takes masks takes no shared heads
            k, v = (shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1) for shared in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )

    def _mix_chunks(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, cut: SequenceCut) -> Tensor:
        """Queries of this rank over the keys of all ranks, each chunk over the keys up to its own end only."""
        assert isinstance(mask, Tensor)
        k, v = cut.gather(torch.stack((k, v)), -2)
        size, parts = k.shape[-2] // cut.total, []
        rows = zip(cut.chunks, q.split(size, dim=-2), mask.split(size, dim=-2), strict=True)
        for chunk, part, visible in rows:
            end = (chunk + 1) * size
            parts.append(self._mix(part, k[..., :end, :], v[..., :end, :], visible[..., :end]))
        return torch.cat(parts, dim=-2)

    def _kernel(self) -> AbstractContextManager[None]:
        return sdpa_kernel(_BACKENDS[self.backend]) if self.backend in _BACKENDS else nullcontext()
