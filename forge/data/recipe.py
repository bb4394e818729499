"""What decides the content of a prepared folder, besides the text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from attrs import frozen

from forge.data.shard import FORMAT_VERSION
from forge.data.tokenizer import Tokenizer

SHARD_TOKENS = 100_000_000


@frozen
class Recipe:
    """How text becomes token files."""

    path: str
    """As `find_source` and `find_token_files` take it."""
    tokenizer: Tokenizer
    eval_fraction: float
    """Share of the documents held out; 0 = none."""
    text_key: str = "text"
    """Of the text in JSON lines, Parquet and datasets."""
    raw_dtype: str = "auto"
    """Of token files without a header: 'uint16', 'uint32', or 'auto' for 16 bits where the vocabulary fits."""
    shard_tokens: int = SHARD_TOKENS
    """Most tokens a file, unless one document alone is longer."""

    def digest(self) -> str:
        """A fingerprint of all but the path, the tokenizer by its content."""
        name, file = self.tokenizer.name, Path(self.tokenizer.name)
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        ids = (self.tokenizer.vocab_size, self.tokenizer.eod_id)
        rest = (self.eval_fraction, self.text_key, self.raw_dtype, self.shard_tokens)
        return hashlib.sha256(json.dumps((FORMAT_VERSION, name, content, ids, rest)).encode()).hexdigest()
