"""What a finished (or unfinished) run can be used for: its state back, its held-out loss, its text."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
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
from forge.config import DistributedConfig, EvalSource, JobConfig, load_config
from forge.data import Batch, build_tokenizer, share_of
from forge.distributed.launch import find_launch
from forge.errors import CheckpointError
from forge.model.attention import CUDA_KERNELS
from forge.pytree import PyTree
from forge.training.average import params_to_use
from forge.training.data_pipeline import open_data, open_eval_sets
from forge.training.eval import run_eval_sets
from forge.training.extras import router_bias
from forge.training.generate import Sampling
from forge.training.parts import Parts, adopt, build_parts, initial_state, template_state
from forge.training.runtime import Runtime, build_runtime, open_runtime
from forge.training.samples import Sample, sample_texts
from forge.training.state import TrainState

Device = Literal["auto", "cpu", "cuda"]


@frozen
class Trained:
    """A state of a run and what made it."""

    config: JobConfig
    parts: Parts
    state: TrainState

    def params(self) -> dict[str, Tensor]:
        """The parameters to evaluate and export: the average where the run keeps one."""
        return params_to_use(self.parts.optimizer, self.state)


@frozen
class Generated:
    """Texts, and how long they took."""

    samples: list[Sample]
    seconds: float


def load_run(run_dir: str | Path, *, step: int = -1, device: Device = "auto") -> Trained:
    """Read a run's state back, whole, into this process.

    Args:
        step: which checkpoint; -1 = the newest sound one.
        device: auto | cpu | cuda.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = choose_checkpoint(Path(run_dir) / "checkpoints", step)
    config = _to_use(load_config(path / "config.toml"), device)
    return _load(path, config, build_runtime(config))


@contextmanager
def open_run(
    run_dir: str | Path, *, step: int = -1, device: Device = "auto", distributed: DistributedConfig | None = None
) -> Generator[Trained, None, None]:
    """A run's state, laid out over all processes of the job for as long as the context lasts.

    Args:
        distributed: how it is laid out over several processes; unset = as it was trained.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: the layout does not fit the number of processes.
    """
    path = choose_checkpoint(Path(run_dir) / "checkpoints", step)
    config = _to_use(load_config(path / "config.toml"), device)
    ranks = find_launch().world_size
    layout = DistributedConfig() if ranks == 1 else distributed or config.distributed
    # Any layout can cut so many sequences, whatever an update was made of.
    train = evolve(config.train, micro_batch_size=1, global_batch_size=ranks)
    config = evolve(config, distributed=layout, train=train)
    with open_runtime(config) as runtime:
        yield _load(path, config, runtime)


def _to_use(config: JobConfig, device: Device) -> JobConfig:
    # Without a backward pass there is nothing to recompute, one evaluation does not pay for compiling, and weights
    # trained through fp8 products are whole.
    train = evolve(
        config.train, device=device, compile=False, cuda_graphs=False, activation_checkpointing="none", fp8=False
    )
    model = config.model
    if model.attention_backend in ("flash", *CUDA_KERNELS):  # which another device may not have
        model = evolve(model, attention_backend="auto")
    return evolve(config, train=train, model=model)


def _load(path: Path, config: JobConfig, runtime: Runtime) -> Trained:
    parts = build_parts(config, runtime)
    return Trained(config, parts, restore(path, config, parts))


def restore(path: Path, config: JobConfig, parts: Parts) -> TrainState:
    """The state in a checkpoint, or the one before the first update where it holds a model to start from.

    Raises:
        CheckpointError: damage, or another shape of model or optimizer.
    """
    manifest = read_manifest(path)
    template = template_state(config, parts, manifest["step"])
    if has_parameters_only(manifest):
        model = {"params": template.params, "extras": router_bias(template.extras)}
        start: dict[str, PyTree] = load_checkpoint(path, model, device=parts.runtime.device)
        state = initial_state(config, parts, start["params"])
        return evolve(state, extras={**state.extras, **start["extras"]})
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


def evaluate_run(
    run_dir: str | Path,
    *,
    step: int = -1,
    device: Device = "auto",
    batches: int,
    paths: Sequence[str] = (),
    distributed: DistributedConfig | None = None,
) -> dict[str, float]:
    """`run_eval_sets` of a run's checkpoint, at most `batches` batches a set; `step` among the results.

    Of several ranks each computes its share of every batch, and all get the same.

    Args:
        paths: data to evaluate on in the place of the run's own sets, see `named_sets`.

    Raises:
        ConfigError: two paths of one name.
        DataError: missing, empty or damaged data, or tokens beyond the model's vocabulary.
    """
    further = named_sets(paths)
    with open_run(run_dir, step=step, device=device, distributed=distributed) as trained:
        runtime = trained.parts.runtime
        own = trained.config.eval
        asked = evolve(own, interval=1, batches=batches, sets=further or own.sets)
        config = evolve(trained.config, eval=asked)
        sets = open_eval_sets(config, runtime) if paths else open_data(config, runtime).eval_sets

        def place(batch: Batch) -> Batch:
            return share_of(batch, runtime.data_rank, runtime.data_ranks).to(runtime.device)

        found = run_eval_sets(trained.parts.eval_step, trained.params(), trained.state.extras, sets, place=place)
        return {"step": float(trained.state.step), **found}


def named_sets(paths: Sequence[str]) -> tuple[EvalSource, ...]:
    """Evaluation sets of NAME=PATH, or of a path alone, whose name is its last part."""
    found = []
    for path in paths:
        name, equals, rest = path.partition("=")
        if not (equals and re.fullmatch(r"[\w.-]+", name)):
            name, rest = re.sub(r"[^\w.-]+", "-", Path(path).stem).strip("-") or "data", path
        found.append(EvalSource(name, rest))
    return tuple(found)


def generate_from_run(
    run_dir: str | Path,
    *,
    prompts: Sequence[str],
    sampling: Sampling,
    max_new_tokens: int,
    step: int = -1,
    device: Device = "auto",
    samples: int = 1,
    seed: int = 0,
    stop: Sequence[str] = (),
    distributed: DistributedConfig | None = None,
) -> Generated:
    """`sample_texts` from a run's checkpoint; of several ranks all get the same."""
    with open_run(run_dir, step=step, device=device, distributed=distributed) as trained:
        start = time.perf_counter()
        made = sample_texts(
            trained.config,
            trained.parts,
            trained.params(),
            trained.state.extras,
            build_tokenizer(trained.config.data.tokenizer),
            prompts,
            sampling,
            max_new_tokens=max_new_tokens,
            samples=samples,
            seed=seed,
            stop=stop,
        )
        return Generated(made, time.perf_counter() - start)
