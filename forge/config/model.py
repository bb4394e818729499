"""The `model` section: the shape of a decoder-only transformer."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from attrs import field, frozen

from forge.config.checks import boolean, integer, number, one_of, optional
from forge.errors import ConfigError


@frozen
class MoEConfig:
    """Mixture of experts in place of the MLP; off while `n_experts` is 0."""

    SECTION: ClassVar[str] = "model.moe"

    n_experts: int = field(default=0, validator=integer(least=0))
    """Routed experts a layer; 0 = a dense MLP everywhere."""
    top_k: int = field(default=2, validator=integer(least=1))
    """Experts that each token is sent to."""
    n_shared_experts: int = field(default=0, validator=integer(least=0))
    """Experts that every token passes through, beside the routed ones."""
    shared_expert_gate: bool = field(default=False, validator=boolean())
    """Weigh what the shared experts make by the sigmoid of a learned score of the token (Qwen 2 MoE)."""
    expert_hidden_dim: int | None = field(default=None, validator=optional(integer(least=1)))
    """Hidden width of one expert; unset = the width of the dense MLP."""
    frequency: int = field(default=1, validator=integer(least=1))
    """Every n-th layer is MoE, the last of each n; 1 = all layers."""
    router: Literal["softmax", "sigmoid"] = field(default="softmax", validator=one_of("softmax", "sigmoid"))
    """softmax: the k likeliest (Mixtral); sigmoid: balanced by a bias used for selection only (DeepSeek-V3)."""
    norm_topk_prob: bool = field(default=True, validator=boolean())
    """Divide the scores of the chosen experts by their sum, so that they weigh 1 together."""
    capacity_factor: float | None = field(default=None, validator=optional(number(above=0)))
    """Tokens an expert keeps in training, as a multiple of tokens * top_k / n_experts, earliest first; unset = all."""
    aux_loss_weight: float | None = field(default=None, validator=optional(number(least=0)))
    """Weight of the Switch balance loss E sum(f P) (Fedus et al. 2021, eq. 4); unset: softmax 0.01, sigmoid 0."""
    router_z_loss_weight: float = field(default=0.0, validator=number(least=0))
    """Weight of the router z-loss mean(logsumexp(router logits)^2) (ST-MoE 2022, eq. 5)."""
    bias_update_rate: float = field(default=1e-3, validator=number(least=0))
    """Step of the sigmoid router's balancing bias after each update (DeepSeek-V3, sec. 2.1.2)."""

    def __attrs_post_init__(self) -> None:
        if self.n_experts and self.top_k > self.n_experts:
            raise ConfigError(
                f"model.moe.top_k = {self.top_k} exceeds model.moe.n_experts = {self.n_experts}: lower top_k"
            )
        if self.shared_expert_gate and not self.n_shared_experts:
            raise ConfigError(
                "model.moe.shared_expert_gate = true has nothing to weigh: set model.moe.n_shared_experts >= 1"
            )

    @property
    def balance_weight(self) -> float:
        """Weight of the load-balancing loss, given or derived."""
        if self.aux_loss_weight is not None:
            return self.aux_loss_weight
        return 0.01 if self.router == "softmax" else 0.0


@frozen
class ModelConfig:
    """Shape of the transformer: a field left unset follows from the others."""

    SECTION: ClassVar[str] = "model"

    dim: int = field(default=768, validator=integer(least=1))
    """Width of the residual stream."""
    n_layers: int = field(default=12, validator=integer(least=1))
    """Transformer blocks."""
    n_heads: int | None = field(default=None, validator=optional(integer(least=1)))
    """Query heads; unset = dim / head_dim, with heads 64 wide where head_dim is unset too."""
    n_kv_heads: int | None = field(default=None, validator=optional(integer(least=1)))
    """Key and value heads (grouped-query attention); unset = as many as query heads."""
    head_dim: int | None = field(default=None, validator=optional(integer(least=1)))
    """Width of one head; unset = dim / n_heads."""
    ffn_hidden_dim: int | None = field(default=None, validator=optional(integer(least=1)))
    """Hidden width of the MLP; unset = 8/3 dim up to a multiple of 64 when gated, else 4 dim."""
    vocab_size: int = field(default=32000, validator=integer(least=2))
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    max_seq_len: int = field(default=2048, validator=integer(least=1))
    """Longest sequence that the model accepts."""
    norm: Literal["rmsnorm", "layernorm"] = field(default="rmsnorm", validator=one_of("rmsnorm", "layernorm"))
    """Normalisation before attention, MLP and head."""
    norm_eps: float = field(default=1e-5, validator=number(above=0))
    """Added to the variance under the root."""
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = field(
        default="swiglu", validator=one_of("swiglu", "geglu", "gelu", "relu2")
    )
    """swiglu and geglu are gated (three matrices), gelu and relu2 plain (two)."""
    bias: bool = field(default=False, validator=boolean())
    """Biases on the projections (GPT-2)."""
    qkv_bias: bool = field(default=False, validator=boolean())
    """Biases on the query, key and value projections only (Qwen 2)."""
    qk_norm: bool = field(default=False, validator=boolean())
    """RMSNorm on each query and key head (Qwen 3)."""
    position: Literal["rope", "learned"] = field(default="rope", validator=one_of("rope", "learned"))
    """Rotary embedding in attention, or a learned embedding added to the input (GPT-2)."""
    restart_positions: bool = field(default=False, validator=boolean())
    """Positions count from the start of each document, not of the sequence; needs data.isolate_documents."""
    rope_theta: float = field(default=10000.0, validator=number(above=0))
    """Base of the rotary frequencies."""
    rope_scaling_factor: float = field(default=1.0, validator=number(least=1))
    """Llama-3 stretching of the low frequencies; 1 = none."""
    rope_low_freq_factor: float = field(default=1.0, validator=number(above=0))
    """Wavelengths beyond original_max_seq_len / this are stretched in full."""
    rope_high_freq_factor: float = field(default=4.0, validator=number(above=0))
    """Wavelengths below original_max_seq_len / this are kept."""
    rope_original_max_seq_len: int = field(default=8192, validator=integer(least=1))
    """Sequence length before stretching."""
    tied_embeddings: bool = field(default=False, validator=boolean())
    """The head is the embedding matrix."""
    sliding_window: int | None = field(default=None, validator=optional(integer(least=1)))
    """A token attends to this many latest tokens, itself included; unset = to all."""
    attention_backend: Literal["auto", "flash", "efficient", "cudnn", "math", "flex"] = field(
        default="auto", validator=one_of("auto", "flash", "efficient", "cudnn", "math", "flex")
    )
    """Kernel of attention; torch.func.vmap over samples wants math. flex skips on CUDA what documents and windows hide,
    and is auto elsewhere."""
    logit_softcap: float | None = field(default=None, validator=optional(number(above=0)))
    """Logits become cap * tanh(logits / cap) (Gemma 2); unset = off."""
    init_std: float = field(default=0.02, validator=number(above=0))
    """Standard deviation of the initial weights; residual outputs get init_std / sqrt(2 n_layers)."""
    mup_base_dim: int | None = field(default=None, validator=optional(integer(least=1)))
    """muP: the dim at which learning rate, decay and init_std were tuned; unset = the standard parametrisation. Heads
    and hidden widths are taken to grow with dim: give those of both models in proportion."""
    moe: MoEConfig = field(factory=MoEConfig)
    """Mixture of experts."""

    def __attrs_post_init__(self) -> None:
        if self.head_dim is None and self.dim % self.query_heads:
            raise ConfigError(
                f"model.dim = {self.dim} is not divisible by {self.query_heads} heads:"
                " set model.n_heads to a divisor of it, or model.head_dim"
            )
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"model.n_heads = {self.query_heads} is not divisible by model.n_kv_heads = {self.kv_heads}"
            )
        if self.position == "rope" and self.head_width % 2:
            raise ConfigError(
                f"model.head_dim = {self.head_width} is odd: rotary embedding turns pairs, so it must be even"
            )
        if self.moe.n_experts and self.moe.frequency > self.n_layers:
            raise ConfigError(
                f"model.moe.frequency = {self.moe.frequency} exceeds model.n_layers = {self.n_layers}, so that no layer"
                " would have experts: lower it"
            )
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ConfigError(
                f"model.rope_high_freq_factor = {self.rope_high_freq_factor} must be greater than"
                f" model.rope_low_freq_factor = {self.rope_low_freq_factor}"
            )
        if self.mup_base_dim and self.head_dim is None and self.n_heads and self.mup_base_dim % self.n_heads:
            raise ConfigError(
                f"model.mup_base_dim = {self.mup_base_dim} is not divisible by model.n_heads = {self.n_heads}:"
                " set model.head_dim in place of model.n_heads, so that wider models have more heads"
            )

    @property
    def query_heads(self) -> int:
        """Query heads, given or derived."""
        return self.n_heads or max(1, self.dim // (self.head_dim or 64))

    @property
    def kv_heads(self) -> int:
        """Key and value heads, given or derived."""
        return self.n_kv_heads or self.query_heads

    @property
    def head_width(self) -> int:
        """Width of one head, given or derived."""
        return self.head_dim or self.dim // self.query_heads

    @property
    def width_multiplier(self) -> float:
        """muP's m: how much wider the model is than the one that was tuned; 1 without muP."""
        return self.dim / self.mup_base_dim if self.mup_base_dim else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor of q k^T, where it is not 1 / sqrt(head_width).

        muP divides by the width of a head, not its root (Yang et al. 2022, definition 4.1), and agrees at the base.
        """
        if self.mup_base_dim is None:
            return None
        base = self.head_dim or self.mup_base_dim // (self.n_heads or max(1, self.mup_base_dim // 64))
        return None if base == self.head_width else math.sqrt(base) / self.head_width

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, and so three matrices."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def ffn_width(self) -> int:
        """Hidden width of the dense MLP, given or derived."""
        if self.ffn_hidden_dim:
            return self.ffn_hidden_dim
        return -(-8 * self.dim // (3 * 64)) * 64 if self.gated else 4 * self.dim

    @property
    def expert_width(self) -> int:
        """Hidden width of one expert, given or derived."""
        return self.moe.expert_hidden_dim or self.ffn_width

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block `layer` (from 0) has experts: the last of every `moe.frequency` layers."""
        return self.moe.n_experts > 0 and (layer + 1) % self.moe.frequency == 0
