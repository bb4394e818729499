"""A trained model out to the layout of Hugging Face, and a model in that layout as the start of a run."""

from __future__ import annotations

from pathlib import Path

from forge.checkpoint.huggingface import export_checkpoint, import_folder, parse_size
from forge.checkpoint.parameters import start_from
from forge.config import JobConfig
from forge.errors import ConfigError
from forge.metrics import count_parameters
from forge.resilience import lock_run
from forge.training.reload import choose_checkpoint


def export_run(
    run_dir: str | Path, out: str | Path, *, step: int = -1, shard_size: str = "5GB", dtype: str = "keep"
) -> str:
    """Write the model of a run's checkpoint as a folder that `transformers` reads.

    Args:
        out: a folder that does not exist yet.
        step: which checkpoint; -1 = the newest sound one.
        shard_size: most weights a file: 5GB, 500MB, 512MiB.
        dtype: of the weights: keep | fp32 | bf16.

    Returns:
        What was made, as one line.

    Raises:
        ForgeError: no checkpoint, or a model that no family of Hugging Face's can express; see `export_checkpoint`.
    """
    shard_bytes = parse_size(shard_size)
    path = choose_checkpoint(Path(run_dir) / "checkpoints", step)
    family = export_checkpoint(path, Path(out), shard_bytes=shard_bytes, dtype=dtype)
    return f"{out}: {path} as {family}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})"


def import_run(folder: str | Path, run_dir: str | Path, *, step: int = -1, dtype: str = "keep") -> str:
    """Make a run that starts from a Hugging Face model, see `import_folder`, or from another run, see `start_from`.

    Args:
        step: which checkpoint of a run; -1 = the newest sound one.

    Returns:
        What was made and how to go on, as one line.

    Raises:
        ForgeError: a model that forge cannot express, damaged files, or a folder that holds a run.
    """
    folder, run_dir = Path(folder), Path(run_dir)
    if not (folder / "config.json").exists() and (folder / "checkpoints").is_dir():
        path = choose_checkpoint(folder / "checkpoints", step)
        with lock_run(run_dir):
            config = start_from(path, run_dir, dtype=dtype)
        return _started(config, str(path), "", "")
    if step != -1:
        raise ConfigError(f"--step {step}: {folder} is no run, and has no steps to choose from")
    with lock_run(run_dir):
        family, config = import_folder(folder, run_dir, dtype=dtype)
    tokenizer = config.data.tokenizer
    missing = "" if Path(tokenizer).is_file() else f" its tokenizer.json was not there: put it at {tokenizer};"
    return _started(config, family, missing, " --data.path YOUR_TEXT")


def _started(config: JobConfig, origin: str, missing: str, flags: str) -> str:
    size, kept, run_dir = count_parameters(config.model).total / 1e6, config.train.param_dtype, config.run_dir
    return (
        f"{run_dir}: {origin}, {size:.2f} M parameters in {kept};{missing}"
        f" train: python cli.py train --config {run_dir}/config.toml{flags}"
    )
