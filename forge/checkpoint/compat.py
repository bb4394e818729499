"""Whether a run may go on under a config that is not the one it was started with."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from forge.config import JobConfig, diff_configs
from forge.errors import CheckpointError

FREE_SECTIONS = ("eval", "checkpoint", "metrics", "profiling", "distributed")
FREE_KEYS = frozenset(
    {
        "run_dir",
        "data.path",  # the checkpoint's tokens are compared by content, not by where they lie
        "data.cache_dir",
        "data.prefetch",
        "data.workers",
        "train.steps",
        "train.device",
        "train.micro_batch_size",
        "train.loss",
        "train.loss_chunk_size",
        "train.activation_checkpointing",
        "train.compile",
        "train.compile_scope",
        "train.cuda_graphs",
        "train.deterministic",
        "train.max_consecutive_skips",
        "train.max_rollbacks",
        "model.attention_backend",
    }
)
"""Keys that change where, how fast or how long a run trains, but not what one update computes."""


def check_resumable(
    saved: JobConfig, asked: JobConfig, path: Path, step: int | None = None, *, parameters_only: bool = False
) -> None:
    """Refuse to go on where the configs disagree about what is trained.

    Args:
        step: updates made so far; data phases that begin later may change. None = no phase may.
        parameters_only: the checkpoint is a model to start from, and only the model must be the same.

    Raises:
        CheckpointError: names every differing key with both values.
    """
    differing = {
        key: values
        for key, values in diff_configs(_comparable(saved, step), _comparable(asked, step)).items()
        if key not in FREE_KEYS
        and key.split(".")[0] not in FREE_SECTIONS
        and (not parameters_only or key.startswith("model."))
    }
    if differing:
        listed = ", ".join(f"{key} = {old!r} there, {new!r} asked" for key, (old, new) in differing.items())
        raise CheckpointError(f"{path} contradicts the config: {listed}; take another --run-dir or the values there")


def _comparable(config: JobConfig, step: int | None) -> JobConfig:
    """The config with its data phases up to a step in one form, and without the places where sources lie."""
    phases = tuple(phase for phase in config.data.all_phases if step is None or phase.start_step < step)
    sources = tuple(evolve(source, path="-") for source in config.data.sources)
    plain = config.data.alone(config.data.path)
    return evolve(config, data=evolve(plain, sources=sources, phases=phases))
