"""A checkpoint -> a folder that `transformers` reads. One file's worth of weights is in memory at a time."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forge
from forge.checkpoint.huggingface.config_json import write_config_json
from forge.checkpoint.huggingface.families import family_of
from forge.checkpoint.huggingface.tensors import Origins, origins, to_family, units
from forge.checkpoint.huggingface.tokenizer import write_tokenizer
from forge.checkpoint.layout import Layout
from forge.checkpoint.load import read_layout, read_parts, verify_checkpoint
from forge.checkpoint.save import CONFIG, write_tensors, writing
from forge.config import JobConfig, ModelConfig, ScheduleFree, load_config
from forge.data import build_tokenizer
from forge.errors import CheckpointError, ConfigError
from forge.files import sync_file, sync_folder
from forge.model import build_model
from forge.pytree import tree_flatten_named, tree_unflatten_named
from forge.training.optimizer import build_optimizer, init_opt_state, parameter_roles, with_master_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Read = Callable[[Iterable[str]], dict[str, Tensor]]
"""Names of parameters -> their values."""


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


def split_by_size(groups: Iterable[tuple[list[str], int]], most: int) -> list[list[list[str]]]:
    """Groups with their bytes -> consecutive ones together, of at most `most` bytes, but at least one group."""
    shards: list[list[list[str]]] = []
    room = 0
    for group, size in groups:
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(group)
        room -= size
    return shards


def _reader(path: Path, config: JobConfig) -> Read:
    """The parameters to evaluate and export, from a checkpoint: the average, for schedule-free."""
    layout, model = read_layout(path), build_model(config.model)
    meta = {name: p.detach() for name, p in model.named_parameters()}
    dtype = DTYPES[config.train.param_dtype]
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    if config.train.param_dtype != "fp32":
        optimizer = with_master_weights(optimizer)
    averaged = _averaged(config, layout)
    folds = config.model.mup_base_dim is not None

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        params = {name: meta[name].to(dtype) for name in names}
        state = init_opt_state(optimizer, {name: p for name, p in params.items() if name in averaged})
        template = {"params": params, "opt_state": state}
        leaves = read_parts(path, layout, tree_flatten_named(template), "cpu")
        found = tree_unflatten_named(template, leaves)
        params = optimizer.eval_params(found["params"], found["opt_state"]) if averaged else found["params"]
        return {name: p * standard_factor(name, config.model) for name, p in params.items()} if folds else params

    return read


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


def _averaged(config: JobConfig, layout: Layout) -> set[str]:
    """The parameters whose state the average is recovered from; those that were trained by schedule-free."""
    if not isinstance(config.optimizer, ScheduleFree):
        return set()
    start = "opt_state/z/"
    return {name.removeprefix(start) for name in layout if name.startswith(start)}
