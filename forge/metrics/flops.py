"""Parameters and floating point operations of a model, counted from its config alone."""

from __future__ import annotations

from attrs import frozen

from forge.config import ModelConfig

BACKWARD_AND_FORWARD = 3
"""A matmul's backward pass is two matmuls of the same size: one for each operand's gradient."""


@frozen
class ParameterCount:
    """Numbers of parameters; biases and all, a tied head counted once."""

    total: int
    active: int  # without the routed experts that a token is not sent to
    by_part: dict[str, int]  # embedding, attention, mlp, experts, router, norms, head; sums to total


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Parameters of the model that `forge.model.build_model` makes, by part; shared experts are among the experts."""
    dense, moe = _layers(config)
    weights, shared = _matmul_weights(config, config.moe.n_experts), moe * _shared_mlp_bias(config)
    learned = config.max_seq_len * config.dim if config.position == "learned" else 0
    by_part = {
        "embedding": config.vocab_size * config.dim + learned,
        "attention": weights["attention"] + config.n_layers * _attention_bias(config),
        "mlp": weights["mlp"] + dense * _mlp_bias(config, config.ffn_width),
        "experts": weights["experts"] + shared,
        "router": weights["router"],
        "norms": _norm_parameters(config),
        "head": 0 if config.tied_embeddings else weights["head"],
    }
    total = sum(by_part.values())
    idle = weights["experts"] - matmul_weights_per_token(config)["experts"]
    return ParameterCount(total, total - idle, by_part)


def matmul_weights_per_token(config: ModelConfig) -> dict[str, int]:
    """Weights that one token is multiplied with: attention, mlp, experts (top k and shared), router, head.

    Lookups, norms and biases are no matmuls; a tied head is one.
    """
    return _matmul_weights(config, config.moe.top_k)


def attention_pairs(config: ModelConfig, seq_len: int) -> int:
    """Query-key pairs of one causal sequence, within the sliding window where the model has one."""
    window = min(config.sliding_window or seq_len, seq_len)
    return window * (window + 1) // 2 + (seq_len - window) * window


def count_flops_per_token(config: ModelConfig, seq_len: int, *, causal: bool = True) -> float:
    """Exact matmul FLOPs of forward and backward, averaged over the tokens of one sequence; recomputation left out.

    A multiply-add is two FLOPs. A pair of a query and a key costs head_dim multiply-adds in q k^T and as many in the
    weighted sum of values, for each query head.

    Args:
        config: the model.
        seq_len: tokens of the sequence.
        causal: count the pairs that the mask lets through; False counts all seq_len^2, which is what
            `attention_backend = "math"` computes.
    """
    pairs = attention_pairs(config, seq_len) if causal else seq_len**2
    weights = sum(matmul_weights_per_token(config).values())
    attention = config.n_layers * 2 * config.query_heads * config.head_width * pairs / seq_len
    return BACKWARD_AND_FORWARD * 2 * (weights + attention)


def _layers(config: ModelConfig) -> tuple[int, int]:
    """Blocks with a dense MLP, and blocks with experts."""
    moe = sum(config.is_moe_layer(layer) for layer in range(config.n_layers))
    return config.n_layers - moe, moe


def _matmul_weights(config: ModelConfig, routed: int) -> dict[str, int]:
    """Weights of all matrices, with `routed` of the routed experts a layer."""
    dense, moe = _layers(config)
    heads = 2 * config.query_heads + 2 * config.kv_heads  # wq and wo, wk and wv
    mlp = (3 if config.gated else 2) * config.dim  # a unit of hidden width
    return {
        "attention": config.n_layers * heads * config.head_width * config.dim,
        "mlp": dense * mlp * config.ffn_width,
        "experts": moe * mlp * config.expert_width * (routed + config.moe.n_shared_experts),
        "router": moe * (config.moe.n_experts + config.moe.shared_expert_gate) * config.dim,
        "head": config.vocab_size * config.dim,
    }


def _attention_bias(config: ModelConfig) -> int:
    qkv = (config.query_heads + 2 * config.kv_heads) * config.head_width
    return qkv * (config.bias or config.qkv_bias) + config.dim * config.bias


def _mlp_bias(config: ModelConfig, width: int) -> int:
    return ((2 if config.gated else 1) * width + config.dim) * config.bias


def _shared_mlp_bias(config: ModelConfig) -> int:
    """Routed experts have no biases; the shared ones are one MLP, which has."""
    shared = config.moe.n_shared_experts
    return _mlp_bias(config, shared * config.expert_width) if shared else 0


def _norm_parameters(config: ModelConfig) -> int:
    one = config.dim * (2 if config.norm == "layernorm" and config.bias else 1)
    heads = 2 * config.head_width * config.qk_norm
    return (2 * config.n_layers + 1) * one + config.n_layers * heads
