"""Random models of each family."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from forge.checkpoint.huggingface.families import FAMILIES
from forge.config import ModelConfig, MoEConfig

NAMES = [family.model_type for family in FAMILIES]


def model(family: str, **changes: Any) -> ModelConfig:
    """A tiny model of a family; `moe` changes the experts."""
    experts: dict[str, Any] = {
        "mixtral": {"n_experts": 4, "expert_hidden_dim": 12},
        "qwen3_moe": {"n_experts": 4, "expert_hidden_dim": 12, "norm_topk_prob": False, "frequency": 2},
        "qwen2_moe": {"n_experts": 4, "expert_hidden_dim": 12, "n_shared_experts": 2, "shared_expert_gate": True},
    }
    own: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 5},
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True, "head_dim": 6},
        "qwen3_moe": {"qk_norm": True},
        "qwen2_moe": {"qkv_bias": True},
        "gpt2": {"norm": "layernorm", "position": "learned", "bias": True, "mlp": "gelu", "n_kv_heads": 4},
    }
    base = {
        "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden_dim": 24, "vocab_size": 40,
        "max_seq_len": 32, "norm_eps": 1e-5, "init_std": 0.3,
    }  # fmt: skip
    moe = MoEConfig(**{**experts.get(family, {}), **changes.pop("moe", {})})
    return ModelConfig(**{**base, **own.get(family, {}), **changes}, moe=moe)


@st.composite
def models(draw) -> ModelConfig:
    """Any model that some family can express."""
    family = draw(st.sampled_from(NAMES))
    changes: dict[str, Any] = {
        "n_layers": draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(2, 40)),
        "tied_embeddings": draw(st.booleans()),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }
    if family == "gpt2":
        changes |= {
            "mlp": draw(st.sampled_from(["gelu", "relu2"])),
            "ffn_hidden_dim": draw(st.sampled_from([None, 24])),
        }
        return model(family, **changes)
    changes |= {
        "mlp": draw(st.sampled_from(["swiglu", "geglu"])),
        "head_dim": draw(st.sampled_from([4, 6])),
        "n_kv_heads": draw(st.sampled_from([1, 2, 4])),
        "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        "rope_scaling_factor": draw(st.sampled_from([1.0, 8.0])),
        "rope_original_max_seq_len": 16,
        "sliding_window": None if family == "llama" else draw(st.sampled_from([None, 5])),
        "bias": family == "llama" and draw(st.booleans()),
    }
    if family.endswith("moe"):
        moe = {
            "frequency": draw(st.integers(1, min(2, changes["n_layers"]))),
            "norm_topk_prob": draw(st.booleans()),
            "top_k": draw(st.integers(1, 4)),
        }
        return model(family, moe=moe, **changes)
    return model(family, **changes)
