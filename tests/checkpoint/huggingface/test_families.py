"""The family follows from the model; a model that none can express is told by the keys that keep it out."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings

from forge.checkpoint.huggingface.families import FAMILIES, family_of, resolved
from forge.config import ModelConfig, MoEConfig
from forge.errors import ConfigError
from tests.checkpoint.huggingface.shapes import NAMES, model, models


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_of_the_family_whose_parts_it_has(name):
    assert family_of(model(name)).model_type == name


def test_a_width_that_the_heads_do_not_divide_is_mistrals():
    assert family_of(model("llama", dim=18, head_dim=4)).model_type == "mistral"  # LlamaConfig refuses it


def test_the_presets_for_llama_and_gpt2_have_a_layout():
    from pathlib import Path

    from forge.config import load_config

    configs = Path(__file__).parents[3] / "configs"
    found = {name: family_of(load_config(configs / f"{name}.toml").model).model_type for name in
             ("llama_1b", "llama_8b", "llama_70b", "gpt2_124m", "tiny")}  # fmt: skip
    assert found == {
        "llama_1b": "llama",
        "llama_8b": "llama",
        "llama_70b": "llama",
        "gpt2_124m": "gpt2",
        "tiny": "qwen3",
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (model("llama", logit_softcap=30.0), "llama, the nearest of .*, has model.logit_softcap = none, not 30.0"),
        (model("llama", mlp="relu2"), "model.mlp = swiglu or geglu, not relu2"),
        (model("llama", norm="layernorm"), "model.norm = rmsnorm, not layernorm"),
        (model("qwen3", qkv_bias=True), "model.qk_norm = false, not true|model.qkv_bias = false, not true"),
        (model("llama", bias=True, sliding_window=5), "model.sliding_window = none, not 5"),
        (model("gpt2", n_kv_heads=2), "model.n_kv_heads as many as model.n_heads, not 2"),
        (model("gpt2", norm="rmsnorm"), "model.norm = layernorm, not rmsnorm"),
        (model("mixtral", moe={"router": "sigmoid"}), "model.moe.router = softmax, not sigmoid"),
        (model("mixtral", moe={"capacity_factor": 1.5}), "model.moe.capacity_factor = none, not 1.5"),
        (model("qwen2_moe", moe={"shared_expert_gate": False}), "model.moe.shared_expert_gate = true, not false"),
        (model("qwen3_moe", moe={"n_shared_experts": 1}), "model.moe.n_shared_experts = 0, not 1"),
    ],
)  # fmt: skip
def test_what_no_family_has_is_one_line_that_names_the_key(changed, message):
    with pytest.raises(ConfigError, match=message) as error:
        family_of(changed)
    assert "\n" not in str(error.value)


@settings(deadline=None, max_examples=60)
@given(models())
def test_a_family_is_found_for_every_model_that_one_can_express(config):
    family = family_of(config)
    assert all(resolved(config)[key] == value for key, value in family.fixed.items())


def test_every_key_of_the_model_section_is_placed_or_of_no_consequence():
    """So that a key added to the model section is decided on here too."""
    of_training = {
        "attention_backend", "restart_positions", "moe.aux_loss_weight", "moe.router_z_loss_weight", "moe.bias_update_rate",
        "moe.shared_expert_gate",  # fixed where there are shared experts
    }  # fmt: skip
    written_apart = {"mlp", "sliding_window", "moe.n_shared_experts"}
    written_apart |= {"mup_base_dim"}  # whose factors go into the weights
    rope = {key for key in resolved(ModelConfig()) if key.startswith("rope_")}
    for family in FAMILIES:
        placed = {*family.keys, *family.fixed}
        if not family.has_experts:  # without experts the others mean nothing
            placed |= {key for key in resolved(ModelConfig()) if key.startswith("moe.")}
        unplaced = resolved(ModelConfig()).keys() - placed - of_training - written_apart - rope
        assert unplaced <= ({"n_kv_heads", "head_dim", "qkv_bias"} if family.model_type == "gpt2" else set())


def test_a_gate_without_shared_experts_is_refused():
    with pytest.raises(ConfigError, match=r"model.moe.shared_expert_gate = true has nothing to weigh"):
        evolve(ModelConfig(), moe=MoEConfig(n_experts=2, shared_expert_gate=True))
