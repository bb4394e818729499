"""Text from a trained model, as text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from forge.config import JobConfig
from forge.data import Tokenizer
from forge.errors import ConfigError
from forge.logging import get_logger
from forge.model import build_model
from forge.pytree import PyTree
from forge.training.generate import generate

log = get_logger(__name__)


def sample_text(
    config: JobConfig,
    params: dict[str, Tensor],
    extras: PyTree,
    tokenizer: Tokenizer,
    *,
    prompt: str | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """The prompt and what the model makes of it, up to the end of a document.

    What is not given comes from `config.eval`.

    Raises:
        ConfigError: an empty prompt, a token beyond the model's vocabulary, or an impossible sampling parameter.
    """
    text = config.eval.sample_prompt if prompt is None else prompt
    ids = torch.as_tensor(tokenizer.encode(text), dtype=torch.int64)
    if ids.numel() == 0:
        raise ConfigError("the prompt is empty: give at least one character")
    if int(ids.max()) >= config.model.vocab_size:
        raise ConfigError(f"the prompt has token {int(ids.max())}, beyond model.vocab_size = {config.model.vocab_size}")
    device = params["embed.weight"].device
    tokens = generate(
        build_model(config.model),
        params,
        ids.to(device).unsqueeze(0),
        max_new_tokens=config.eval.sample_tokens if max_new_tokens is None else max_new_tokens,
        temperature=config.eval.sample_temperature if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_id=tokenizer.eod_id,
        extras=extras,
    )
    made = [int(token) for token in tokens]
    return tokenizer.decode([*ids.tolist(), *made])


def record_sample(path: Path, step: int, text: str) -> None:
    """Add a line to a run's `samples.jsonl`, in the place of what was written at or after `step` before.

    A kill leaves the old file or the new one. A sample is no reason to fail: what cannot be written is a warning.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [line for line in before if json.loads(line)["step"] < step]
        lines.append(json.dumps({"step": step, "text": text}))
        aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: the sample cannot be kept (%s)", path, error)
