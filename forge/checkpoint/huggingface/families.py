"""The families of models that `transformers` and forge both know, as data: what each can express, and its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import attrs
from attrs import field, frozen

from forge.config import ModelConfig
from forge.errors import ConfigError


class Module(NamedTuple):
    """Where a module's weight and bias lie in a family's files."""

    name: str  # with {layer} and {expert} in it
    transposed: bool = False  # the weight is (in, out)
    part: int | None = None  # which of three equal parts of the tensor's last dimension; None = all of it


Window = Literal["none", "every layer", "by layer"]
"""Sliding windows: none, `sliding_window` for all layers, or behind `use_sliding_window`, layer by layer (Qwen)."""

REQUIRED = object()
"""Default of a key that config.json must have."""


@frozen
class Family:
    """One architecture of `transformers`. Keys of ours are those of the model section: `dim`, `moe.top_k`."""

    model_type: str
    architecture: str
    keys: Mapping[str, tuple[str, ...]]  # ours -> those of config.json that hold its value
    fixed: Mapping[str, Any]  # ours -> the one value that the family has
    modules: Mapping[str, Module]  # ours, inside a block or outside -> theirs
    mlp: Mapping[str, tuple[str, ...]]  # `mlp` -> their names of the activation; the first is written
    defaults: Mapping[str, Any] = field(factory=dict)  # of keys that config.json may lack; None = from the others
    only: Mapping[str, tuple[Any, ...]] = field(factory=dict)  # key of config.json -> values that forge can express
    written: Mapping[str, Any] = field(factory=dict)  # further keys of config.json that say what is fixed
    window: Window = "none"
    rope_theta: float | None = 10000.0  # default; None = learned positions
    needs: tuple[tuple[str, Callable[[ModelConfig], bool], str], ...] = ()  # (ours, test, what it should be)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return "moe.n_experts" in self.keys

    @property
    def prefix(self) -> str:
        """What the names of all modules but the head begin with."""
        return self.modules["embed"].name.partition(".")[0] + "."

    @property
    def activation_key(self) -> str:
        """The key of config.json that names the activation."""
        return "activation_function" if self.model_type == "gpt2" else "hidden_act"


_SHAPE = {
    "vocab_size": ("vocab_size",),
    "dim": ("hidden_size",),
    "n_layers": ("num_hidden_layers",),
    "n_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn_hidden_dim": ("intermediate_size",),
    "max_seq_len": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "init_std": ("initializer_range",),
    "tied_embeddings": ("tie_word_embeddings",),
}
_PLAIN = {
    "norm": "rmsnorm", "position": "rope", "bias": False, "qkv_bias": False, "qk_norm": False, "logit_softcap": None,
}  # fmt: skip
_DEFAULTS = {"head_dim": None, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
_GATED = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh", "gelu_new")}
_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{layer}.input_layernorm",
    "attn.wq": "model.layers.{layer}.self_attn.q_proj",
    "attn.wk": "model.layers.{layer}.self_attn.k_proj",
    "attn.wv": "model.layers.{layer}.self_attn.v_proj",
    "attn.wo": "model.layers.{layer}.self_attn.o_proj",
    "attn.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "attn.k_norm": "model.layers.{layer}.self_attn.k_norm",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp.w_gate": "model.layers.{layer}.mlp.gate_proj",
    "mlp.w_up": "model.layers.{layer}.mlp.up_proj",
    "mlp.w_down": "model.layers.{layer}.mlp.down_proj",
}


def _experts(layer: str, router: str, gate: str, up: str, down: str) -> dict[str, Module]:
    """Experts, stored one by one as (out, in), where forge has them stacked as (E, in, out)."""
    stacks = {"w_gate": gate, "w_up": up, "w_down": down}
    modules = {
        f"mlp.experts.{ours}": Module(f"{layer}.experts.{{expert}}.{name}", True) for ours, name in stacks.items()
    }
    return {"mlp.router": Module(f"{layer}.{router}"), **modules}


_MODULES = {ours: Module(name) for ours, name in _LLAMA.items()}
_MIXTRAL = _MODULES | _experts("model.layers.{layer}.block_sparse_moe", "gate", "w1", "w3", "w2")
_QWEN_MOE = _MODULES | _experts("model.layers.{layer}.mlp", "gate", "gate_proj", "up_proj", "down_proj")
_SHARED = {
    f"mlp.{ours}": Module(f"model.layers.{{layer}}.mlp.{name}")
    for ours, name in {
        "shared.w_gate": "shared_expert.gate_proj",
        "shared.w_up": "shared_expert.up_proj",
        "shared.w_down": "shared_expert.down_proj",
        "shared_gate": "shared_expert_gate",
    }.items()
}
_GPT2 = {
    "embed": Module("transformer.wte"),
    "position_embed": Module("transformer.wpe"),
    "norm": Module("transformer.ln_f"),
    "head": Module("lm_head"),
    "attn_norm": Module("transformer.h.{layer}.ln_1"),
    "attn.wq": Module("transformer.h.{layer}.attn.c_attn", transposed=True, part=0),
    "attn.wk": Module("transformer.h.{layer}.attn.c_attn", transposed=True, part=1),
    "attn.wv": Module("transformer.h.{layer}.attn.c_attn", transposed=True, part=2),
    "attn.wo": Module("transformer.h.{layer}.attn.c_proj", transposed=True),
    "mlp_norm": Module("transformer.h.{layer}.ln_2"),
    "mlp.w_up": Module("transformer.h.{layer}.mlp.c_fc", transposed=True),
    "mlp.w_down": Module("transformer.h.{layer}.mlp.c_proj", transposed=True),
}
_QWEN_EXPERTS = {
    "moe.n_experts": ("num_experts",),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.expert_hidden_dim": ("moe_intermediate_size",),
    "moe.frequency": ("decoder_sparse_step",),
    "moe.norm_topk_prob": ("norm_topk_prob",),
}
_QWEN_EXPERT_DEFAULTS = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_SOFTMAX = {"moe.router": "softmax", "moe.capacity_factor": None}


def _family(
    model_type: str,
    architecture: str,
    *,
    keys: Mapping[str, tuple[str, ...]] | None = None,
    fixed: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    modules: Mapping[str, Module] = _MODULES,
    **rest: Any,
) -> Family:
    """A relative of Llama, told by its differences."""
    carried = {**_SHAPE, **(keys or {})}
    whole = {key: value for key, value in {**_PLAIN, **(fixed or {})}.items() if key not in carried}
    return Family(model_type, architecture, carried, whole, modules, _GATED, {**_DEFAULTS, **(defaults or {})}, **rest)


FAMILIES = (
    _family(
        "llama",
        "LlamaForCausalLM",
        keys={"bias": ("attention_bias", "mlp_bias")},
        defaults={"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
        needs=(("n_heads", lambda model: model.dim % model.query_heads == 0, "a divisor of model.dim"),),
    ),
    _family(
        "mistral",
        "MistralForCausalLM",
        defaults={"sliding_window": 4096},
        window="every layer",
    ),
    _family("qwen2", "Qwen2ForCausalLM", fixed={"qkv_bias": True}, window="by layer"),
    _family(
        "qwen3",
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        defaults={"head_dim": 128},
        only={"attention_bias": (False, None)},
        window="by layer",
    ),
    _family(
        "mixtral",
        "MixtralForCausalLM",
        keys={
            "ffn_hidden_dim": ("intermediate_size",),
            "moe.expert_hidden_dim": ("intermediate_size",),
            "moe.n_experts": ("num_local_experts",),
            "moe.top_k": ("num_experts_per_tok",),
        },
        fixed={**_SOFTMAX, "moe.n_shared_experts": 0, "moe.frequency": 1, "moe.norm_topk_prob": True},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
        modules=_MIXTRAL,
        window="every layer",
        rope_theta=1e6,
    ),
    _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys=_QWEN_EXPERTS,
        fixed={**_SOFTMAX, "qk_norm": True, "moe.n_shared_experts": 0},
        defaults=_QWEN_EXPERT_DEFAULTS,
        modules=_QWEN_MOE,
        only={"attention_bias": (False, None), "mlp_only_layers": (None, [])},
        window="by layer",
    ),
    _family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        keys={**_QWEN_EXPERTS, "qkv_bias": ("qkv_bias",)},
        fixed={**_SOFTMAX, "moe.shared_expert_gate": True},
        defaults={**_QWEN_EXPERT_DEFAULTS, "qkv_bias": True},
        modules=_QWEN_MOE | _SHARED,
        only={"mlp_only_layers": (None, [])},
        window="by layer",
        needs=(("moe.n_shared_experts", lambda model: model.moe.n_shared_experts > 0, ">= 1"),),
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        keys={
            "vocab_size": ("vocab_size",),
            "dim": ("n_embd",),
            "n_layers": ("n_layer",),
            "n_heads": ("n_head",),
            "ffn_hidden_dim": ("n_inner",),
            "max_seq_len": ("n_positions",),
            "norm_eps": ("layer_norm_epsilon",),
            "init_std": ("initializer_range",),
            "tied_embeddings": ("tie_word_embeddings",),
        },
        fixed={**_PLAIN, "norm": "layernorm", "position": "learned", "bias": True},
        modules=_GPT2,
        mlp={"gelu": ("gelu_new", "gelu_pytorch_tanh"), "relu2": ("relu2",)},
        defaults={
            "n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        rope_theta=None,
        needs=(
            ("n_kv_heads", lambda model: model.kv_heads == model.query_heads, "as many as model.n_heads"),
            ("head_dim", lambda model: model.head_width * model.query_heads == model.dim, "model.dim / model.n_heads"),
        ),
    ),
)  # fmt: skip


def resolved(model: ModelConfig) -> dict[str, Any]:
    """Every key of the model section, `moe.top_k` and all, with what is left unset derived."""
    values = {key: value for key, value in attrs.asdict(model, recurse=False).items() if key != "moe"}
    values |= {f"moe.{key}": value for key, value in attrs.asdict(model.moe).items()}
    return values | {
        "n_heads": model.query_heads,
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "ffn_hidden_dim": model.ffn_width,
        "moe.expert_hidden_dim": model.expert_width,
        "qkv_bias": model.qkv_bias and not model.bias,
    }


def family_of(model: ModelConfig) -> Family:
    """The first family that can express a model.

    Raises:
        ConfigError: none can; names the keys that keep it out of the nearest one.
    """
    kin = [family for family in FAMILIES if family.has_experts == (model.moe.n_experts > 0)]
    obstacles = {family.model_type: list(_obstacles(family, model)) for family in kin}
    nearest = min(kin, key=lambda family: len(obstacles[family.model_type]))
    if obstacles[nearest.model_type]:
        raise ConfigError(
            f"no Hugging Face layout can express this model: {nearest.model_type}, the nearest of"
            f" {', '.join(obstacles)}, has {'; '.join(obstacles[nearest.model_type])}"
        )
    return nearest


def _obstacles(family: Family, model: ModelConfig) -> Iterator[str]:
    """What the family has otherwise than a model, in words."""
    values = resolved(model)
    for key, value in family.fixed.items():
        if values[key] != value:
            yield f"model.{key} = {_said(value)}, not {_said(values[key])}"
    for key, holds, wanted in family.needs:
        if not holds(model):
            yield f"model.{key} {wanted}, not {_said(values[key])}"
    if model.mlp not in family.mlp:
        yield f"model.mlp = {' or '.join(family.mlp)}, not {model.mlp}"
    if model.sliding_window is not None and family.window == "none":
        yield f"model.sliding_window = none, not {model.sliding_window}"


def _said(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
