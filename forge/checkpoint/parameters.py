"""The parameters to use of a checkpoint, and a checkpoint of what a model is alone: one to start from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from attrs import evolve
from torch import Tensor

from forge.checkpoint.folder import checkpoint_path, list_checkpoints
from forge.checkpoint.layout import PARAMS_PREFIX, Box, Layout, Leaf, key_in_file, layout_to_json
from forge.checkpoint.load import PARAMETERS_ONLY, read_layout, read_parts, read_whole
from forge.checkpoint.save import CONFIG, LAYOUT, Files, describe_file, publish, write_tensors, writing
from forge.config import JobConfig, ScheduleFree, load_config, save_config
from forge.errors import CheckpointError
from forge.model import build_model
from forge.pytree import tree_flatten_named, tree_unflatten_named
from forge.training.average import averaged, init_ema
from forge.training.optimizer import init_opt_state, job_optimizer, parameter_roles
from forge.training.runtime import DTYPES

FILE_BYTES = 4 * 10**9
"""Most bytes of parameters that are read and written at a time."""

Read = Callable[[Iterable[str]], dict[str, Tensor]]
"""names -> parameters in full, on the CPU."""


def open_parameters(path: Path, config: JobConfig) -> Read:
    """The parameters to evaluate and export: the average where the run keeps one.

    Args:
        config: that of the checkpoint.
    """
    layout, model = read_layout(path), build_model(config.model)
    meta = {name: p.detach() for name, p in model.named_parameters()}
    dtype = DTYPES[config.train.param_dtype]
    optimizer = job_optimizer(config, parameter_roles(model))
    trained = _recovered_from_state(config, layout)
    begun = "extras/ema/weight" in layout  # a model to start from has none yet
    kept = config.train if begun else evolve(config.train, ema_decay=None)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        params = {name: meta[name].to(dtype) for name in names}
        state = init_opt_state(optimizer, {name: p for name, p in params.items() if name in trained})
        template = {"params": params, "opt_state": state, "extras": init_ema(kept, params)}
        leaves = read_parts(path, layout, tree_flatten_named(template), "cpu")
        found = tree_unflatten_named(template, leaves)
        params = optimizer.eval_params(found["params"], found["opt_state"]) if trained else found["params"]
        return averaged(params, found["extras"])

    return read


def _recovered_from_state(config: JobConfig, layout: Layout) -> set[str]:
    """The parameters whose state the average is recovered from; those that were trained by schedule-free."""
    if not isinstance(config.optimizer, ScheduleFree):
        return set()
    start = "opt_state/z/"
    return {name.removeprefix(start) for name in layout if name.startswith(start)}


def check_no_run(run_dir: Path) -> None:
    """Refuse a folder that holds a run.

    Raises:
        CheckpointError: it does.
    """
    if list_checkpoints(run_dir / "checkpoints") or (run_dir / CONFIG).exists():
        raise CheckpointError(f"{run_dir} holds a run already: choose another --run-dir")


def write_start(run_dir: Path, config: JobConfig, pieces: Iterable[dict[str, Tensor]], origin: str) -> None:
    """Make a run that starts from a model: its config, and a checkpoint of step 0 that holds nothing else.

    Args:
        pieces: leaves in full, by path in the state, each piece into a file of its own; together all parameters and
            the balancing biases of the routers.
        origin: where they come from, as the manifest notes it.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; what was written is removed.
    """
    final = checkpoint_path(run_dir / "checkpoints", 0)
    aside = final.with_name(f".{final.name}.writing")
    layout: Layout = {}
    files: Files = {}
    with writing(final):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for number, leaves in enumerate(pieces):
                file = f"params.{number:05d}.safetensors"
                files[file] = write_tensors(aside / file, {key_in_file(path): leaf for path, leaf in leaves.items()})
                for path, leaf in leaves.items():
                    shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
                    layout[path] = Leaf(shape, dtype, ((file, Box((0,) * len(shape), shape)),))
            (aside / LAYOUT).write_text(layout_to_json(layout), encoding="utf-8")
            save_config(config, aside / CONFIG)
            files |= {name: describe_file(aside / name) for name in (LAYOUT, CONFIG)}
            publish(aside, final, step=0, tokens=0, files=files, notes={PARAMETERS_ONLY: True, "imported": origin})
            save_config(config, run_dir / CONFIG)
        except BaseException:
            shutil.rmtree(final, ignore_errors=True)
            (run_dir / CONFIG).unlink(missing_ok=True)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def split_by_size(groups: Iterable[tuple[list[str], int]], most: int) -> list[list[list[str]]]:
    """Groups with their bytes -> consecutive ones together, of at most `most` bytes, but at least one group."""
    shards: list[list[list[str]]] = []
    room = 0
    for group, size in groups:
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(group)
        room -= size
    return shards


def start_from(path: Path, run_dir: Path, *, dtype: str = "keep") -> JobConfig:
    """Make a run that starts from the parameters to use of another run's checkpoint, under that run's config.

    The balancing biases of sigmoid routers go with them; step, optimizer state and averages begin anew.

    Args:
        dtype: of the stored parameters: keep | fp32 | bf16.

    Raises:
        CheckpointError: damage, or the run folder holds a run.
    """
    check_no_run(run_dir)
    source = load_config(path / CONFIG)
    kept = source.train.param_dtype if dtype == "keep" else dtype
    config = evolve(source, run_dir=str(run_dir), train=evolve(source.train, param_dtype=kept))  # type: ignore[arg-type]
    read, layout, to = open_parameters(path, source), read_layout(path), DTYPES[kept]
    biases = [leaf for leaf in layout if leaf.startswith("extras/router_bias/")]
    sizes = [([name], p.numel() * to.itemsize) for name, p in build_model(source.model).named_parameters()]

    def pieces() -> Iterator[dict[str, Tensor]]:
        for group in split_by_size(sizes, FILE_BYTES):
            params = read([name for names in group for name in names])
            yield {PARAMS_PREFIX + name: p.to(to) for name, p in params.items()}
        if biases:
            yield {leaf: read_whole(path, layout, leaf) for leaf in biases}

    write_start(run_dir, config, pieces(), str(path))
    return config
