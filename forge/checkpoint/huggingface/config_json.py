"""The model section and `config.json`: one says what the other does, or a line names the key that it cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge.checkpoint.huggingface.families import FAMILIES, REQUIRED, Family, resolved
from forge.config import ModelConfig, MoEConfig
from forge.errors import CheckpointError, ConfigError, did_you_mean
from forge.files import parse_json

_LLAMA3 = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_seq_len": "original_max_position_embeddings",
}
"""Ours -> the keys of a rope of type `llama3`."""


def write_config_json(model: ModelConfig, family: Family, *, dtype: str) -> dict[str, Any]:
    """`config.json` of a model that the family can express, for `transformers` 4 and 5.

    Args:
        dtype: torch's name for that of the weights.
    """
    values = resolved(model)
    written: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "torch_dtype": dtype,
        "use_cache": True,
        **family.written,
    }
    written |= {theirs: values[ours] for ours, keys in family.keys.items() for theirs in keys}
    written[family.activation_key] = family.mlp[model.mlp][0]
    if "moe.shared_expert_gate" in family.fixed:
        written["shared_expert_intermediate_size"] = model.moe.n_shared_experts * model.expert_width
    return written | _write_window(model, family) | _write_rope(model, family)


def _write_window(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.window == "none":
        return {}
    if family.window == "every layer" or model.sliding_window is None:
        off = {} if family.window == "every layer" else {"use_sliding_window": False}
        return {"sliding_window": model.sliding_window, **off}
    return {
        "use_sliding_window": True,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0,  # the first layer that has one
        "layer_types": ["sliding_attention"] * model.n_layers,
    }


def _write_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    if family.rope_theta is None:
        return {}
    theta = {"rope_theta": model.rope_theta}
    if model.rope_scaling_factor == 1.0:
        return theta | {"rope_parameters": {"rope_type": "default", **theta}}
    scaling = {"rope_type": "llama3", **{theirs: getattr(model, ours) for ours, theirs in _LLAMA3.items()}}
    return theta | {"rope_scaling": scaling, "rope_parameters": {**scaling, **theta}}


def load_config_json(file: Path) -> tuple[Family, ModelConfig]:
    """The model that a `config.json` describes.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
        ConfigError: names the key that forge cannot express.
    """
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; --path is the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: damaged: not an object")
    try:
        return read_config_json(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_config_json(values: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Inverse of `write_config_json`; also reads what older and newer versions of `transformers` write.

    Raises:
        ConfigError: names the key that forge cannot express.
    """
    family = _family_named(values.get("model_type"))
    for key, accepted in {"quantization_config": (None,), **family.only}.items():
        if values.get(key, accepted[0]) not in accepted:
            raise ConfigError(f"{key} = {json.dumps(values[key])} is not in forge's model, only {_said(accepted)}")
    ours = dict(family.fixed)
    for key, theirs in family.keys.items():
        ours[key] = _same(family, values, theirs)
    ours |= {"mlp": _activation(family, values), "sliding_window": _window(family, values, ours["n_layers"])}
    if "moe.shared_expert_gate" in family.fixed:
        ours["moe.n_shared_experts"] = _shared_experts(values, ours["moe.expert_hidden_dim"])
    ours |= _rope(family, values, ours["max_seq_len"])
    moe = {key.removeprefix("moe."): value for key, value in ours.items() if key.startswith("moe.")}
    dense = {key: value for key, value in ours.items() if not key.startswith("moe.")}
    return family, ModelConfig(**dense, moe=MoEConfig(**moe))


def _family_named(model_type: object) -> Family:
    known = {family.model_type: family for family in FAMILIES}
    if not isinstance(model_type, str) or model_type not in known:
        hint = did_you_mean(str(model_type), known)
        raise ConfigError(f"model_type = {json.dumps(model_type)} is none of {', '.join(known)}{hint}")
    return known[model_type]


def _same(family: Family, values: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value that all of the keys hold."""
    found = {key: _value(family, values, key) for key in keys}
    if len({json.dumps(value) for value in found.values()}) > 1:
        said = ", ".join(f"{key} = {json.dumps(value)}" for key, value in found.items())
        raise ConfigError(f"{said}: forge's model has one value for both")
    return next(iter(found.values()))


def _value(family: Family, values: Mapping[str, Any], key: str) -> Any:
    if key == "num_experts" and key not in values:  # `transformers` 5 writes Qwen 3's so
        key = "num_local_experts"
    value = values[key] if key in values else family.defaults.get(key, REQUIRED)
    if value is REQUIRED:
        raise ConfigError(f"{key} is missing")
    return value


def _activation(family: Family, values: Mapping[str, Any]) -> str:
    name = _value(family, values, family.activation_key)
    for ours, theirs in family.mlp.items():
        if name in theirs:
            return ours
    known = ", ".join(name for theirs in family.mlp.values() for name in theirs)
    raise ConfigError(f"{family.activation_key} = {json.dumps(name)} is not in forge's model, only {known}")


def _shared_experts(values: Mapping[str, Any], width: Any) -> int:
    whole = values.get("shared_expert_intermediate_size")
    if not isinstance(whole, int) or not isinstance(width, int) or width < 1 or whole < width or whole % width:
        raise ConfigError(
            f"shared_expert_intermediate_size = {json.dumps(whole)} is no multiple of moe_intermediate_size ="
            f" {json.dumps(width)}: forge's shared experts are as wide as the routed ones"
        )
    return whole // width


def _window(family: Family, values: Mapping[str, Any], layers: Any) -> int | None:
    """The window of every layer; None = none has one."""
    if family.window == "none":
        return None
    window = values.get("sliding_window", family.defaults.get("sliding_window"))
    if family.window == "every layer":
        return window
    if not values.get("use_sliding_window", False) or not window:
        return None
    key, types = _layer_types(family, values, layers)
    if set(types) <= {"full_attention"}:
        return None
    if set(types) != {"sliding_attention"}:
        raise ConfigError(f"{key}: some layers have a sliding window and some not; forge's have one or none alike")
    return window


def _layer_types(family: Family, values: Mapping[str, Any], layers: Any) -> tuple[str, list[Any]]:
    """The key that decides, and the attention of each layer."""
    if isinstance(values.get("layer_types"), list):
        return "layer_types", [str(kind) for kind in values["layer_types"]]
    if family.model_type == "qwen3_moe":
        return "use_sliding_window", ["sliding_attention"]
    first = values.get("max_window_layers", 28)
    if family.model_type == "qwen2_moe" or not isinstance(first, int) or not isinstance(layers, int):
        return "max_window_layers", ["sliding_attention", "full_attention"]
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return "max_window_layers", kinds


def _rope(family: Family, values: Mapping[str, Any], max_seq_len: Any) -> dict[str, Any]:
    """The fields of the rotary embedding, from `rope_parameters`, or older files' `rope_theta` and `rope_scaling`."""
    if family.rope_theta is None:
        return {}
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = values.get(key) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{key} = {json.dumps(given)}: forge's model has one rotary embedding for all layers")
    partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(f"partial_rotary_factor = {json.dumps(partial)}: forge's model turns whole heads")
    ours = {"rope_theta": given.get("rope_theta", values.get("rope_theta", family.rope_theta))}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return ours
    if kind != "llama3":
        raise ConfigError(f"{key}.rope_type = {json.dumps(kind)} is not in forge's model, only default, llama3")
    scaling = {"original_max_position_embeddings": max_seq_len, **given}
    for name, theirs in _LLAMA3.items():
        if theirs not in scaling:
            raise ConfigError(f"{key}.{theirs} is missing")
        ours[name] = scaling[theirs]
    return ours


def _said(values: tuple[Any, ...]) -> str:
    return ", ".join(json.dumps(value) for value in values)
