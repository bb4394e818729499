"""The decoder-only transformer. Plain PyTorch on the meta device: parallelism and initialisation come from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge.config import ModelConfig
from forge.model.attention import attention_mask
from forge.model.block import Block, BlockOutput
from forge.model.cache import Cache
from forge.model.embedding import Embedding
from forge.model.head import head_logits
from forge.model.norm import build_norm
from forge.model.rope import rotary_table
from forge.model.sequence import SequenceCut, document_positions, token_positions

OutputFn = Callable[[Tensor, Tensor, list[BlockOutput]], Any]
"""(hidden (B, S, dim), head weight (V, dim), what the blocks left) -> the result of the forward pass."""


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: Embedding | None = Embedding(config.vocab_size, config.dim)
        learned = config.position == "learned"
        self.position_embed = Embedding(config.max_seq_len, config.dim) if learned else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.n_layers)})
        self.norm: nn.Module | None = build_norm(config)
        tied = config.tied_embeddings
        self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")
        self.cut: SequenceCut | None = None
        """How sequences lie over ranks, where context parallelism cuts them; set from outside."""
        self.compiled = False
        """Whether it is, or its blocks are, by torch.compile; set from outside."""

    def forward(
        self,
        input_ids: Tensor,
        doc_ids: Tensor | None = None,
        *,
        output: OutputFn | None = None,
        past: Cache | None = None,
        router_bias: Mapping[str, Tensor] | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        """Run the model and hand its last hidden states to `output`.

        The head's weight goes to `output` too, inside the forward pass, so that a loss can fuse with the head and a
        sharded model has the weight gathered at that moment.

        Args:
            input_ids: int64 (B, S).
            doc_ids: int64 (B, S); tokens attend only within their document.
            output: makes the result; without it fp32 logits (B, S, V).
            past: what was kept of the tokens before; what is read now is kept behind it, and not yet counted as read.
            router_bias: balancing bias (E,) by block index, for sigmoid routers.
            hidden: (B, S, dim) from the pipeline stage before, on a stage that does not embed `input_ids`. A stage
                before the last hands `output` the hidden states of its last block, and no row of the head.
        """
        seen = 0 if past is None else past.length
        cut = self.cut if past is None else None  # with a cache every rank has whole sequences
        positions = token_positions(input_ids.shape[-1], seen, cut, input_ids.device)
        counted = self._counted(positions, doc_ids, past, cut)
        x = self._embedded(input_ids, counted) if hidden is None else hidden
        x, left = self.hidden_states(x, positions, counted, doc_ids, past, router_bias or {})
        weight = x.new_empty(0, x.shape[-1]) if self.norm is None else self.head_weight
        return (output or self.logits)(x, weight, left)

    def _counted(
        self, positions: Tensor, doc_ids: Tensor | None, past: Cache | None, cut: SequenceCut | None
    ) -> Tensor:
        """The positions that a token is told of: (S,) or (B, S)."""
        counted = positions
        if self.config.restart_positions and doc_ids is not None:
            counted = document_positions(doc_ids, cut)
        if past is None:
            return counted
        if past.padding is not None:
            counted = (positions - past.padding.unsqueeze(1)).clamp(min=0)
        # What fills up a tensor parallel rank's share may lie beyond.
        return counted.clamp(max=self.config.max_seq_len - 1)

    def hidden_states(
        self,
        x: Tensor,
        positions: Tensor,
        counted: Tensor,
        doc_ids: Tensor | None,
        past: Cache | None,
        router_bias: Mapping[str, Tensor],
    ) -> tuple[Tensor, list[BlockOutput]]:
        """From the embedding to what `output` is handed: (B, S, dim) both, and what the blocks left.

        Args:
            positions: of the tokens in the sequence, int64 (S,).
            counted: those that they are told of, int64 (S,) or (B, S).
        """
        seen, padding = (0, None) if past is None else (past.length, past.padding)
        cut = self.cut if past is None else None
        rotary = rotary_table(counted, self.config) if self.config.position == "rope" else None
        mask = attention_mask(self.config, positions, seen, doc_ids, cut, padding)
        left: list[BlockOutput] = []
        for layer, block in self.blocks.items():
            keep = None if past is None else partial(past.keep, layer)
            x, rest = block(x, rotary, mask, keep, router_bias.get(layer), cut)
            left.append(rest)
        if self.norm is None:
            return x, left
        x = self.norm(x)
        if self.config.width_multiplier != 1:  # muP's multiplier of the logits, here so that fused losses see it too
            x = x / self.config.width_multiplier
        return x, left

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        assert self.embed is not None, "a later pipeline stage is given hidden states"
        x: Tensor = self.embed(input_ids)
        return x if self.position_embed is None else x + self.position_embed(positions)

    @property
    def head_weight(self) -> Tensor:
        """(V, dim): the head's, or the embedding where they are tied."""
        holder = self.embed if self.head is None else self.head
        assert holder is not None, "this pipeline stage has no head"
        return holder.weight

    def logits(self, hidden: Tensor, head_weight: Tensor, _: list[BlockOutput]) -> Tensor:
        """fp32 logits (B, S, V), the default output."""
        return head_logits(hidden, head_weight, self.config.logit_softcap)


def build_model(config: ModelConfig) -> Transformer:
    """The model on the meta device: shapes and names, no storage."""
    return Transformer(config)
