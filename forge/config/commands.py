"""The flags of the commands that train no model: one class a command, its help text from the field docs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen
from tyro.conf import Positional, UseAppendAction

from forge.config.checks import integer, number, optional
from forge.config.run import DistributedConfig
from forge.errors import ConfigError


@frozen
class RunFolder:
    """Which checkpoint of which run."""

    run_dir: str = "runs/tiny"
    """Folder of a run."""
    step: int = field(default=-1, validator=integer(least=-1))
    """Checkpoint to take; -1 = the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto = the first CUDA device, else the CPU."""
    distributed: DistributedConfig = field(factory=DistributedConfig)
    """Layout over several processes; where no flag of it is given, that of the run."""


@frozen
class Eval(RunFolder):
    """Held-out loss of a trained model."""

    batches: int = field(default=1_000_000, validator=integer(least=1))
    """Most batches a set; a set is finite and taken whole by default."""
    path: UseAppendAction[tuple[str, ...]] = ()
    """Data in the place of what the run held out, as data.path takes it, or NAME=PATH; several may be given."""
    tasks: str = ""
    """Tasks of lm-evaluation-harness, with commas between them, in the place of a loss (pip install lm-eval)."""
    tasks_path: str = ""
    """Folder of further tasks, as YAML files."""

    def __attrs_post_init__(self) -> None:
        if self.tasks and self.path:
            raise ConfigError("--tasks and --path are two evaluations: ask for one of them at a time")
        if self.tasks_path and not self.tasks:
            raise ConfigError(f"--tasks-path {self.tasks_path} is read for --tasks alone: name the tasks too")


@frozen
class Generate(RunFolder):
    """Text from a trained model."""

    prompt: UseAppendAction[tuple[str, ...]] = ()
    """What the model continues, 'def ' by default; several are continued side by side, each as it would be alone."""
    prompt_file: UseAppendAction[tuple[Path, ...]] = ()
    """File whose whole text the model continues; several may be given."""
    max_new_tokens: int = field(default=400, validator=integer(least=0))
    """Tokens to generate."""
    temperature: float = field(default=0.8, validator=number(least=0))
    """Divides the logits; 0 = the likeliest token."""
    top_k: int | None = field(default=None, validator=optional(integer(least=1)))
    """Sample from the k likeliest tokens."""
    top_p: float | None = field(default=None, validator=optional(number(least=0, most=1)))
    """Sample from the likeliest tokens that reach this probability."""
    min_p: float | None = field(default=None, validator=optional(number(least=0, most=1)))
    """Sample from tokens at least so likely, relative to the likeliest."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Text before which a continuation ends; several may be given."""
    samples: int = field(default=1, validator=integer(least=1))
    """Texts of each prompt."""
    seed: int = field(default=0, validator=integer(least=0, most=2**63 - 1))
    """Of the sampling; each further text of a prompt is that of the next seed."""


@frozen
class Prepare:
    """Text to token shards: train-00000.bin, ..., eval-00000.bin, ... and manifest.json."""

    path: str = "stdlib"
    """A file, folder or glob of text, JSON lines, Parquet or tokens; 'hf:NAME[:CONFIG[:SPLIT]]'; or 'stdlib'."""
    out: str = "data/prepared"
    """Folder to make; it must not exist."""
    tokenizer: str = "bytes"
    """'bytes', or the path of a tokenizer.json."""
    eval_fraction: float = field(default=0.02, validator=number(least=0, most=0.5))
    """Share of the documents held out."""
    text_key: str = "text"
    """Key or column of the text in JSON lines, Parquet and datasets."""
    raw_dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Of token files without a header; auto = 16 bits where the tokenizer's vocabulary fits."""
    shard_tokens: int = field(default=100_000_000, validator=integer(least=1))
    """Most tokens a file; a document is never cut."""
    workers: int = field(default=0, validator=integer(least=0))
    """Processes that tokenise where there is much to do; 0 = one a core."""
    verify: str = ""
    """A prepared folder to check against its checksums, instead of making one."""


@frozen
class Export:
    """A trained model as a folder that transformers reads."""

    out: str
    """Folder to make; it must not exist."""
    run_dir: str = "runs/tiny"
    """Folder of a run."""
    step: int = field(default=-1, validator=integer(least=-1))
    """Checkpoint to take; -1 = the newest."""
    shard_size: str = "5GB"
    """Most weights a file: 5GB, 500MB, 512MiB."""
    dtype: Literal["keep", "fp32", "bf16"] = "keep"
    """Of the weights; keep = that of the run's parameters."""


@frozen
class Import:
    """A run that starts from the weights of a Hugging Face model, or of another run."""

    path: str
    """Folder of the model (config.json, safetensors, tokenizer.json), or of a run."""
    run_dir: str
    """Folder of the run to make; it must hold none."""
    dtype: Literal["keep", "fp32", "bf16"] = "keep"
    """Of the stored parameters; keep = as the run has them, or bf16 where all weights of a model are, else fp32."""
    step: int = field(default=-1, validator=integer(least=-1))
    """Which checkpoint of a run; -1 = the newest sound one."""


@frozen
class Replay:
    """A step of a run made again, and compared with what was recorded, to the last bit."""

    run_dir: str = "runs/tiny"
    """Folder of a run."""
    step: int = field(default=-1, validator=integer(least=-1))
    """Number of the update; -1 = that of the newest checkpoint."""


@frozen
class Diff:
    """Two checkpoints compared, tensor by tensor."""

    a: Positional[str] = ""
    """Folder of a checkpoint, runs/x/checkpoints/step_00000012."""
    b: Positional[str] = ""
    """The other."""


@frozen
class Doctor:
    """Whether this machine can carry a run."""

    run_dir: str = "runs/tiny"
    """Folder that runs will write to; it need not exist."""


@frozen
class Report:
    """Runs side by side as one HTML page, readable without a network."""

    runs: Positional[tuple[str, ...]] = ()
    """Run folders; runs that are still going on are read as far as they are."""
    out: str = "report.html"
    """File to write."""
