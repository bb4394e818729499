"""The tokenizer of a run as the files that `transformers.AutoTokenizer` reads, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from forge.data import Tokenizer
from forge.data.tokenizer import BYTES
from forge.errors import CheckpointError
from forge.files import parse_json

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
_COMPANIONS = (SETTINGS, "special_tokens_map.json", "chat_template.jinja", "added_tokens.json")
_END = "<|endoftext|>"


class SpecialTokens(NamedTuple):
    """Ids for `config.json`."""

    bos: int | None
    eos: int


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_seq_len: int) -> SpecialTokens:
    """Put the tokenizer of a run into a folder, with the settings that lie beside it, or such as suffice.

    Raises:
        CheckpointError: its files cannot be copied, or its settings are damaged.
    """
    if tokenizer.name == BYTES:
        inner = _byte_tokenizer()
        inner.save(str(folder / TOKENIZER))
    else:
        inner = _read(copy_tokenizer(Path(tokenizer.name), folder))
    file = folder / SETTINGS
    if not file.exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": inner.id_to_token(tokenizer.eod_id),
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        }
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return SpecialTokens(_bos(file, inner), tokenizer.eod_id)


def copy_tokenizer(file: Path, folder: Path) -> Path:
    """Copy a `tokenizer.json` and the settings beside it.

    Returns:
        The copy.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / TOKENIZER)
        for name in _COMPANIONS:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
    except OSError as error:
        raise CheckpointError(f"{folder}: {file} cannot be copied: {error}") from None
    return folder / TOKENIZER


def _read(file: Path) -> Any:
    import tokenizers  # slow to import

    return tokenizers.Tokenizer.from_file(str(file))


def _byte_tokenizer() -> Any:
    """`ByteTokenizer` in the terms of `tokenizers`: an id a byte, and 256 for the end of a document."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}  # GPT-2's letters for bytes
    letters |= {chr(256 + place): byte for place, byte in enumerate(others)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(_END, special=True)])
    return inner


def _bos(settings: Path, inner: Any) -> int | None:
    """The id of `bos_token`, where the settings name one."""
    try:
        token = parse_json(settings.read_text(encoding="utf-8")).get("bos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{settings}: damaged: {error}") from None
    text = token.get("content") if isinstance(token, dict) else token
    return inner.token_to_id(text) if isinstance(text, str) else None
