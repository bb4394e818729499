"""Text from a trained model, as text."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.config import JobConfig
from forge.data import Tokenizer
from forge.errors import ConfigError
from forge.model import build_model
from forge.pytree import PyTree
from forge.training.generate import generate


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
