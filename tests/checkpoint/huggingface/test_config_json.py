"""config.json says what the model section says, and what forge cannot express is one line that names the key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.checkpoint.huggingface.config_json import load_config_json, read_config_json, write_config_json
from forge.checkpoint.huggingface.families import family_of, resolved
from forge.config import ModelConfig
from forge.errors import CheckpointError, ConfigError
from tests.checkpoint.huggingface.shapes import NAMES, model, models

LLAMA31_8B = {  # meta-llama/Llama-3.1-8B, as on the hub
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
GPT2 = {  # openai-community/gpt2, as on the hub
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
}  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(models())
def test_reading_inverts_writing(config):
    family = family_of(config)
    again, back = read_config_json(json.loads(json.dumps(write_config_json(config, family, dtype="float32"))))
    unread = {"attention_backend"}
    if config.rope_scaling_factor == 1.0 or family.model_type == "gpt2":
        unread |= {key for key in resolved(config) if key.startswith("rope_")}
    if not family.has_experts:
        unread |= {key for key in resolved(config) if key.startswith("moe.") and key != "moe.n_experts"}
    elif family.model_type == "mixtral":
        unread.add("ffn_hidden_dim")  # no layer is dense
    kept, found = resolved(config), resolved(back)
    assert again is family
    assert {key: value for key, value in found.items() if key not in unread} == {
        key: value for key, value in kept.items() if key not in unread
    }


def test_the_older_form_of_llama_is_read():
    _, config = read_config_json(LLAMA31_8B)
    assert config == ModelConfig(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_hidden_dim=14336, vocab_size=128256, max_seq_len=131072,
        rope_theta=500000.0, rope_scaling_factor=8.0, rope_original_max_seq_len=8192,
    )  # fmt: skip


def test_the_length_before_stretching_is_by_default_that_of_the_model():
    values = {**LLAMA31_8B, "rope_scaling": {**LLAMA31_8B["rope_scaling"]}}
    del values["rope_scaling"]["original_max_position_embeddings"]
    assert read_config_json(values)[1].rope_original_max_seq_len == 131072


def test_every_version_of_transformers_is_told_that_all_layers_have_the_window():
    config = model("qwen3", sliding_window=5)
    values = write_config_json(config, family_of(config), dtype="float32")
    assert (values["use_sliding_window"], values["sliding_window"], values["max_window_layers"]) == (True, 5, 0)
    assert values["layer_types"] == ["sliding_attention"] * 2


def test_gpt2_with_what_it_leaves_out_is_read():
    _, config = read_config_json(GPT2)
    assert config == ModelConfig(
        dim=768, n_layers=12, n_heads=12, vocab_size=50257, max_seq_len=1024, norm="layernorm", mlp="gelu", bias=True,
        position="learned", tied_embeddings=True,
    )  # fmt: skip


def test_defaults_are_those_of_transformers():
    values = {key: value for key, value in written("mistral").items() if key not in ("sliding_window", "rope_theta")}
    del values["rope_parameters"], values["rms_norm_eps"], values["tie_word_embeddings"]
    _, config = read_config_json(values)
    assert (config.sliding_window, config.rope_theta, config.norm_eps) == (4096, 10000.0, 1e-6)
    assert not config.tied_embeddings
    values = {key: value for key, value in written("mixtral").items() if not key.startswith("rope")}
    assert read_config_json(values)[1].rope_theta == 1e6


def test_experts_under_the_name_of_transformers_5_are_read():
    values = written("qwen3_moe")
    values["num_local_experts"] = values.pop("num_experts")
    assert read_config_json(values)[1].moe.n_experts == 4


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 7}, None),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, 7),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}, 7),
    ],
)
def test_a_window_of_qwen_counts_where_every_layer_has_it(changes, window):
    values = {key: value for key, value in written("qwen2").items() if key != "layer_types"}
    assert read_config_json({**values, **changes})[1].sliding_window == window


def written(name: str, **changes) -> dict:
    config = model(name)
    return {**write_config_json(config, family_of(config), dtype="float32"), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "gemma2"}, 'model_type = "gemma2" is none of llama, mistral'),
        ("llama", {"model_type": "lama"}, "did you mean 'llama'"),
        ("llama", {"model_type": None}, "model_type = null"),
        ("llama", {"attention_bias": True}, "attention_bias = true, mlp_bias = false: forge's model has one value"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not in forge\'s model, only silu'),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, 'rope_scaling.rope_type = "yarn"'),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}, 'rope_scaling.rope_type = "linear"'),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "rope_scaling.low_freq_factor is missing"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "one rotary embedding for all layers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: forge's model turns whole heads"),
        ("llama", {"num_hidden_layers": "two"}, "model.n_layers must be an integer >= 1, got 'two'"),
        ("llama", {"num_key_value_heads": 3}, "model.n_heads = 4 is not divisible by model.n_kv_heads = 3"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true is not in forge's model, only false"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, "max_window_layers: some layers"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
         "layer_types: some layers have a sliding window"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 13}, "shared_expert_intermediate_size = 13 is no multiple"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function = "relu" is not in'),
    ],
)  # fmt: skip
def test_what_forge_cannot_express_is_one_line_that_names_the_key(name, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_config_json(written(name, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_missing_is_named(name):
    values = written(name)
    key = "n_layer" if name == "gpt2" else "num_hidden_layers"
    del values[key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_config_json(values)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"{", "damaged"), (b"[1]", "not an object"), (b"\xff", "damaged")]
)
def test_a_file_that_is_none_is_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_config_json(tmp_path / "config.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 50) | st.floats() | st.sampled_from(["", "llama3", "silu", "gelu_new"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["rope_type", "type", "factor"]), inner)
    ),
    max_leaves=3,
)
KEYS = sorted({*LLAMA31_8B, *(key for name in NAMES for key in written(name)), "use_sliding_window", "layer_types"})


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(NAMES), changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_any_other_value_is_read_or_one_line(name, changes):
    try:
        family, config = read_config_json(written(name, **changes))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert family.model_type in NAMES and isinstance(config, ModelConfig)
