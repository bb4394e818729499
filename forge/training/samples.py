"""Text from a trained model, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from forge.config import JobConfig
from forge.data import Tokenizer
from forge.errors import ConfigError
from forge.files import replace_file, step_lines
from forge.logging import get_logger
from forge.model import build_model
from forge.pytree import PyTree
from forge.training.generate import Sampling, generate
from forge.training.parts import Parts
from forge.training.reading import open_reader

_BROKEN = "\ufffd"

log = get_logger(__name__)


@frozen
class Sample:
    """What the model made of a prompt."""

    text: str  # the prompt, and its continuation up to the end of a document or a stop string
    tokens: int  # generated
    continuation: str  # without the prompt


def sample_texts(
    config: JobConfig,
    parts: Parts,
    params: dict[str, Tensor],
    extras: PyTree,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    samples: int = 1,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> list[Sample]:
    """Continue all prompts side by side; each gets the texts that it would get alone.

    Of several ranks, every one must call it together, and all get the same.

    Args:
        params: of the model in this process's layout.
        samples: texts of each prompt, in a row: the first that of `seed`, the next that of `seed` + 1, and so on.
        seed: of every prompt's own generator.
        stop: a text ends before the first of these.

    Raises:
        ConfigError: an empty prompt or stop string, or a token beyond the model's vocabulary.
        RunError: logits that are not finite.
    """
    if "" in stop:
        raise ConfigError("a stop string is empty: give at least one character")
    device = parts.runtime.device
    ids = [_ids(config, tokenizer, prompt).to(device) for prompt in prompts for _ in range(samples)]
    seeds = [*range(seed, seed + samples)] * len(prompts)
    texts = [TextStream(tokenizer, row.tolist(), stop) for row in ids]
    mesh = parts.runtime.mesh
    model = build_model(config.model) if mesh is None else parts.model
    with open_reader(model, params, extras, mesh=mesh, compute_dtype=parts.runtime.compute_dtype) as read:
        tokens = generate(
            read, ids, sampling, max_new_tokens=max_new_tokens, max_seq_len=config.model.max_seq_len, seeds=seeds
        )
        for row in tokens:
            for text, token in zip(texts, row.tolist(), strict=True):
                text.add(token)
            if all(text.ended for text in texts):
                break
    for text in texts:
        text.end()
    heads = [tokenizer.decode(row.tolist()) for row in ids]
    return [Sample(head + text.text, text.tokens, text.text) for head, text in zip(heads, texts, strict=True)]


def _ids(config: JobConfig, tokenizer: Tokenizer, prompt: str) -> Tensor:
    ids = torch.as_tensor(tokenizer.encode(prompt), dtype=torch.int64)
    if ids.numel() == 0:
        raise ConfigError("the prompt is empty: give at least one character")
    if int(ids.max()) >= config.model.vocab_size:
        raise ConfigError(f"the prompt has token {int(ids.max())}, beyond model.vocab_size = {config.model.vocab_size}")
    return ids


class TextStream:
    """Tokens to text as they come: what may still become another character or a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._decode, self._eod, self._stop = tokenizer.decode, tokenizer.eod_id, tuple(stop)
        self._ids, self._from, self._shown = list(prompt), 0, len(prompt)
        self._held = ""
        self.text = ""
        """What is certain so far, without the prompt."""
        self.ended = False
        """Whether the end of a document or a stop string was met; what comes after it is ignored."""
        self.tokens = 0
        """How many were taken in, the one that ended the text included."""

    def add(self, token: int) -> str:
        """Take a token in and give the text that is certain now."""
        if self.ended:
            return ""
        self.tokens += 1
        if token == self._eod:
            return self.end()
        self._ids.append(token)
        made = self._made()
        if not made or made.endswith(_BROKEN):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return self._take(made)

    def end(self) -> str:
        """Give what was held back: no token follows."""
        if self.ended:
            return ""
        certain = self._take(self._made())
        if not self.ended:
            certain, self.text = certain + self._held, self.text + self._held
            self._held, self.ended = "", True
        return certain

    def _made(self) -> str:
        """Text of the newest tokens, decoded behind others: some tokenizers treat the first of a text differently."""
        before = self._decode(self._ids[self._from : self._shown])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _take(self, made: str) -> str:
        """Give what comes before the stop string that is complete first, or what cannot begin one."""
        whole = self._held + made
        found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in self._stop if stop in whole]
        self.ended = bool(found)
        end = min(found)[1] if found else len(whole) - _begun(whole, self._stop)
        self._held = "" if found else whole[end:]
        self.text += whole[:end]
        return whole[:end]


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


def record_sample(path: Path, step: int, text: str) -> None:
    """Add a line to a run's `samples.jsonl`, in the place of what was written at or after `step` before.

    A kill leaves the old file or the new one. A sample is no reason to fail: what cannot be written is a warning.
    """
    try:
        before = [line for at, line in step_lines(path) if at < step] if path.exists() else []
        lines = [json.dumps(line) for line in (*before, {"step": step, "text": text})]
        replace_file(path, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        log.warning("%s: the sample cannot be kept (%s)", path, error)
