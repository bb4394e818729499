"""The `data` and `eval` sections."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen

from forge.config.checks import boolean, integer, number, one_of, text


@frozen
class DataConfig:
    """What is read, and how it becomes sequences."""

    SECTION: ClassVar[str] = "data"

    path: str = field(default="stdlib", validator=text())
    """A prepared folder; a file, folder or glob of text, JSON lines, Parquet or tokens; 'hf:NAME'; or 'stdlib'."""
    tokenizer: str = field(default="bytes", validator=text())
    """'bytes', or the path of a tokenizer.json."""
    text_key: str = field(default="text", validator=text())
    """Key or column of the text in JSON lines, Parquet and datasets."""
    raw_dtype: Literal["auto", "uint16", "uint32"] = field(default="auto", validator=one_of("auto", "uint16", "uint32"))
    """Of token files without a header; auto = 16 bits where the tokenizer's vocabulary fits."""
    eval_fraction: float = field(default=0.02, validator=number(least=0, most=0.5))
    """Share of the documents held out for evaluation."""
    isolate_documents: bool = field(default=True, validator=boolean())
    """Tokens attend within their document and no document predicts the next one's first token."""
    prefetch: int = field(default=2, validator=integer(least=0))
    """Batches made ahead in the background; 0 = none."""
    cache_dir: str = field(default="~/.cache/forge", validator=text())
    """Where text given by path is kept as tokens."""


@frozen
class EvalConfig:
    """Held-out loss, and a sample of what the model writes."""

    SECTION: ClassVar[str] = "eval"

    interval: int = field(default=0, validator=integer(least=0))
    """Updates between evaluations; 0 = none. With an interval, the last update is evaluated too."""
    batches: int = field(default=32, validator=integer(least=1))
    """Most batches an evaluation; a smaller set is taken whole, each batch once."""
    batch_size: int = field(default=8, validator=integer(least=1))
    """Sequences a batch."""
    sample_tokens: int = field(default=0, validator=integer(least=0))
    """Tokens to generate at the end of the run; 0 = none."""
    sample_prompt: str = field(default="def ", validator=text())
    """Text that the sample continues."""
    sample_temperature: float = field(default=0.8, validator=number(least=0))
    """Temperature of the sample; 0 = the likeliest token."""
