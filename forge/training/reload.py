"""What a finished (or unfinished) run can be used for: its state back, its held-out loss, its text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import evolve, frozen
from torch import Tensor

from forge.checkpoint import (
    checkpoint_path,
    has_parameters_only,
    latest_sound,
    list_checkpoints,
    load_checkpoint,
    read_manifest,
    verify_checkpoint,
)
from forge.config import JobConfig, load_config
from forge.data import build_tokenizer
from forge.errors import CheckpointError
from forge.training.data_pipeline import build_data_pipeline
from forge.training.eval import run_eval_sets
from forge.training.parts import Parts, adopt, build_parts, initial_state, template_state
from forge.training.runtime import build_runtime
from forge.training.samples import sample_text
from forge.training.state import TrainState

Device = Literal["auto", "cpu", "cuda"]


@frozen
class Trained:
    """A state of a run and what made it."""

    config: JobConfig
    parts: Parts
    state: TrainState

    def params(self) -> dict[str, Tensor]:
        """The parameters to evaluate and export: the average, for schedule-free."""
        return self.parts.optimizer.eval_params(self.state.params, self.state.opt_state)


def load_run(run_dir: str | Path, *, step: int = -1, device: Device = "auto") -> Trained:
    """Read a run's state back.

    Args:
        step: which checkpoint; -1 = the newest sound one.
        device: auto | cpu | cuda.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    root = Path(run_dir) / "checkpoints"
    path = choose_checkpoint(root, step)
    config = load_config(path / "config.toml")
    # Without a backward pass there is nothing to recompute, one evaluation does not pay for compiling, and weights
    # trained through fp8 products are whole.
    train = evolve(config.train, device=device, compile=False, activation_checkpointing="none", fp8=False)
    config = evolve(config, train=train)
    parts = build_parts(config, build_runtime(config))
    return Trained(config, parts, restore(path, config, parts))


def restore(path: Path, config: JobConfig, parts: Parts) -> TrainState:
    """The state in a checkpoint, or the one before the first update where it holds a model to start from.

    Raises:
        CheckpointError: damage, or another shape of model or optimizer.
    """
    template = template_state(config, parts, read_manifest(path)["step"])
    if has_parameters_only(path):
        only = load_checkpoint(path, {"params": template.params}, device=parts.runtime.device)
        return initial_state(config, parts, only["params"])
    return adopt(parts, load_checkpoint(path, template, device=parts.runtime.device))


def choose_checkpoint(root: Path, step: int) -> Path:
    """The checkpoint of a step, or the newest sound one for -1.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    there = ", ".join(path.name for path in list_checkpoints(root))
    if not there:
        raise CheckpointError(f"{root}: no checkpoint here: train first, or give another --run-dir")
    if step < 0:
        path = latest_sound(root)
        if path is None:
            raise CheckpointError(f"{root}: every checkpoint is damaged ({there})")
        return path
    path = checkpoint_path(root, step)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint; there are {there}")
    verify_checkpoint(path)
    return path


def evaluate_run(run_dir: str | Path, *, step: int = -1, device: Device = "auto", batches: int) -> dict[str, float]:
    """`run_eval_sets` of a run's checkpoint, at most `batches` batches a set; `step` among the results."""
    trained = load_run(run_dir, step=step, device=device)
    asked = evolve(trained.config.eval, interval=1, batches=batches)
    data = build_data_pipeline(evolve(trained.config, eval=asked))
    metrics = run_eval_sets(
        trained.parts.eval_step,
        trained.params(),
        trained.state.extras,
        data.eval_sets,
        place=lambda batch: batch.to(trained.parts.runtime.device),
    )
    return {"step": float(trained.state.step), **metrics}


def generate_from_run(
    run_dir: str | Path,
    *,
    prompt: str,
    max_new_tokens: int,
    step: int = -1,
    device: Device = "auto",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """`sample_text` from a run's checkpoint."""
    trained = load_run(run_dir, step=step, device=device)
    return sample_text(
        trained.config,
        trained.params(),
        trained.state.extras,
        build_tokenizer(trained.config.data.tokenizer),
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
