"""The decoder-only transformer. Plain PyTorch on the meta device: parallelism and initialisation come from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forge.config import ModelConfig
from forge.model.attention import KeyValue, attention_mask
from forge.model.block import Block, BlockOutput
from forge.model.head import head_logits
from forge.model.norm import build_norm
from forge.model.rope import rotary_table

OutputFn = Callable[[Tensor, Tensor, list[BlockOutput]], Any]
"""(hidden (B, S, dim), head weight (V, dim), what the blocks left) -> the result of the forward pass."""


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim, device="meta")
        learned = config.position == "learned"
        self.position_embed = nn.Embedding(config.max_seq_len, config.dim, device="meta") if learned else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = build_norm(config)
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")

    def forward(
        self,
        input_ids: Tensor,
        doc_ids: Tensor | None = None,
        *,
        output: OutputFn | None = None,
        past: Sequence[KeyValue] | None = None,
        router_bias: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Run the model and hand its last hidden states to `output`.

        The head's weight goes to `output` too, inside the forward pass, so that a loss can fuse with the head and a
        sharded model has the weight gathered at that moment.

        Args:
            input_ids: int64 (B, S).
            doc_ids: int64 (B, S); tokens attend only within their document.
            output: makes the result; without it fp32 logits (B, S, V).
            past: keys and values of the tokens before, one pair a block (empty ones to start a cache).
            router_bias: balancing bias (E,) by block index, for sigmoid routers.
        """
        seen = past[0][0].shape[2] if past else 0
        x = self.embed(input_ids)
        rotary = None
        positions = torch.arange(seen, seen + input_ids.shape[-1], device=input_ids.device)
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        else:
            rotary = rotary_table(positions, self.config)
        mask = attention_mask(self.config, input_ids.shape[-1], seen, doc_ids, input_ids.device)
        left: list[BlockOutput] = []
        biases = router_bias or {}
        for index, block in enumerate(self.blocks):
            x, rest = block(x, rotary, mask, past[index] if past else None, biases.get(str(index)))
            left.append(rest)
        return (output or self.logits)(self.norm(x), self.head_weight, left)

    @property
    def head_weight(self) -> Tensor:
        """(V, dim): the head's, or the embedding where they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor, head_weight: Tensor, _: list[BlockOutput]) -> Tensor:
        """fp32 logits (B, S, V), the default output."""
        return head_logits(hidden, head_weight, self.config.logit_softcap)


def build_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: shapes and names, no storage."""
    return Transformer(config)
