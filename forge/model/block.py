"""One pre-norm transformer block."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from forge.config import ModelConfig
from forge.model.attention import Attention, Mask
from forge.model.cache import Keep
from forge.model.mlp import MLP
from forge.model.moe import MoE, RouterStats
from forge.model.norm import build_norm
from forge.model.rope import RotaryTable
from forge.model.sequence import SequenceCut


class BlockOutput(NamedTuple):
    """What a block leaves besides the residual stream."""

    router: RouterStats | None  # what the router did, in a block with experts


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the mlp dense or a mixture of experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = build_norm(config)
        self.attn = Attention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = MoE(config) if config.is_moe_layer(layer) else MLP(config, config.ffn_width)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        mask: Mask | None,
        keep: Keep | None = None,
        router_bias: Tensor | None = None,
        cut: SequenceCut | None = None,
    ) -> tuple[Tensor, BlockOutput]:
        """x (B, S, dim) -> (B, S, dim) and the rest."""
        x = x + self.attn(self.attn_norm(x), rotary, mask, keep, cut)
        if isinstance(self.mlp, MoE):
            mixed, router = self.mlp(self.mlp_norm(x), router_bias, cut)
            return x + mixed, BlockOutput(router)
        return x + self.mlp(self.mlp_norm(x)), BlockOutput(None)
