"""A checkpoint -> a folder that `transformers` reads. One file's worth of weights is in memory at a time."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forge
from forge.checkpoint.huggingface.config_json import write_config_json
from forge.checkpoint.huggingface.families import family_of
from forge.checkpoint.huggingface.tensors import Origins, origins, to_family, units
from forge.checkpoint.huggingface.tokenizer import write_tokenizer
from forge.checkpoint.load import verify_checkpoint
from forge.checkpoint.parameters import Read, open_parameters, split_by_size
from forge.checkpoint.save import CONFIG, write_tensors, writing
from forge.config import JobConfig, ModelConfig, load_config
from forge.data import build_tokenizer
from forge.errors import CheckpointError, ConfigError
from forge.files import sync_file, sync_folder
from forge.model import build_model
from forge.training.runtime import DTYPES

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` or `512MiB`.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise ConfigError(f"shard_size must be a size such as 5GB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def export_checkpoint(path: Path, out: Path, *, shard_bytes: int, dtype: str = "keep") -> str:
    """Write `config.json`, `generation_config.json`, the weights and the tokenizer of a checkpoint.

    Args:
        out: a folder that does not exist yet; it appears whole, or not at all.
        shard_bytes: most bytes of weights a file; a file holds at least one parameter, or one stack of experts.
        dtype: keep | fp32 | bf16.

    Returns:
        The family, by the name that `transformers` has for it.

    Raises:
        ConfigError: no family can express the model; the message names the keys.
        DataError: the tokenizer is missing or damaged.
        CheckpointError: the checkpoint is damaged, `out` exists, or cannot be written.
    """
    config = load_config(path / CONFIG)
    family = family_of(config.model)
    if out.exists():
        raise CheckpointError(f"{out} exists already: choose another --out, or remove it")
    tokenizer = build_tokenizer(config.data.tokenizer)
    verify_checkpoint(path)
    model = {name: p.detach() for name, p in build_model(config.model).named_parameters()}
    kept = DTYPES[config.train.param_dtype if dtype == "keep" else dtype]
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(out):
            aside.mkdir(parents=True)
            tokens = write_tokenizer(tokenizer, aside, config.model.max_seq_len)
            special = {"bos_token_id": tokens.bos, "eos_token_id": tokens.eos}
            described = write_config_json(config.model, family, dtype=str(kept).removeprefix("torch."))
            _write_json(aside / "config.json", {**described, **special})
            _write_json(aside / "generation_config.json", {"_from_model_config": True, **special})
            _write_weights(aside, origins(family, model), model, _reader(path, config), shard_bytes, kept)
            sync_folder(aside)
            aside.rename(out)
            sync_folder(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return family.model_type


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    sync_file(file)


def _write_weights(
    folder: Path, found: Origins, model: Mapping[str, Tensor], read: Read, shard_bytes: int, dtype: torch.dtype
) -> None:
    """The weights, in one file or in several with an index."""
    sizes = {name: model[name].numel() * dtype.itemsize for name in found}
    shards = split_by_size(
        [(names, sum(sizes[name] for name in names)) for names in units(found).values()], shard_bytes
    )
    placed: dict[str, str] = {}
    for number, groups in enumerate(shards, start=1):
        names = [name for group in groups for name in group]
        tensors = {name: tensor.to(dtype) for name, tensor in to_family(found, read(names)).items()}
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, tensors)
        placed |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        metadata = {"total_size": sum(sizes.values()), "forge": forge.__version__}
        _write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": placed})


def _reader(path: Path, config: JobConfig) -> Read:
    """The parameters to use of a checkpoint, for the standard model."""
    read = open_parameters(path, config)
    if config.model.mup_base_dim is None:
        return read

    def folded(names: Iterable[str]) -> dict[str, Tensor]:
        return {name: p * standard_factor(name, config.model) for name, p in read(names).items()}

    return folded


def standard_factor(name: str, model: ModelConfig) -> float:
    """What a parameter is multiplied by in the standard model that computes the same as one with muP's multipliers.

    The last norm takes that of the logits; the queries, or their norm, take the scale of attention.
    """
    module = name.rpartition(".")[0]
    if module == "norm":
        return 1 / model.width_multiplier
    if model.attention_scale is not None and module.endswith(".q_norm" if model.qk_norm else ".wq"):
        return model.attention_scale * math.sqrt(model.head_width)
    return 1.0
