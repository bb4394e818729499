"""A folder of safetensors and a manifest -> TrainState. What is damaged is found and named before it is used.

Each rank reads the slices that its own parts need, from whichever files hold them: any layout loads into any other.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge.checkpoint.folder import checkpoint_step, list_checkpoints
from forge.checkpoint.layout import (
    PARAMS,
    PARAMS_PREFIX,
    REST,
    Box,
    Layout,
    Leaf,
    check_tiling,
    key_in_file,
    layout_from_json,
    part_of,
)
from forge.checkpoint.ranks import all_ranks
from forge.checkpoint.save import FORMAT, LAYOUT, MANIFEST, SEAL, describe_file, manifest_digest
from forge.distributed.shards import as_sharded
from forge.errors import CheckpointError
from forge.files import parse_json
from forge.logging import get_logger
from forge.pytree import tree_flatten_named, tree_unflatten_named

T = TypeVar("T")

log = get_logger(__name__)

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""safetensors' names -> torch's."""
_DESCRIBED = {"bytes", "sha256"}
PARAMETERS_ONLY = "parameters_only"
"""The note of a checkpoint that holds a model to start from: parameters, balancing biases, and no state of a run."""


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not one of ours.
    """
    file = path / MANIFEST
    try:
        manifest = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint here ({MANIFEST} is missing)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from None
    if not isinstance(manifest, dict) or not {"format", "step", "files", "notes"} <= manifest.keys():
        raise CheckpointError(f"{file}: damaged: not a checkpoint's manifest")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{file}: format {manifest['format']}; this version of forge reads format {FORMAT}")
    if manifest.get(SEAL) != manifest_digest(manifest):
        raise CheckpointError(f"{file}: damaged: its SHA-256 is not that of what was written")
    files = manifest["files"]
    if not isinstance(files, dict) or not all(isinstance(f, dict) and f.keys() == _DESCRIBED for f in files.values()):
        raise CheckpointError(f"{file}: damaged: it does not give bytes and sha256 of every file")
    return manifest


def has_parameters_only(manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is a model to start from, without the state of a run.

    Args:
        manifest: what `read_manifest` gave.
    """
    return bool(manifest["notes"].get(PARAMETERS_ONLY, False))


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check the size and SHA-256 of every file against the manifest, which is returned.

    The ranks of a job share the files among them and come to one verdict.

    Raises:
        CheckpointError: a file is missing or damaged; the message names it.
    """
    ranks = all_ranks()

    def check_share() -> dict[str, Any]:
        manifest = read_manifest(path)
        for name in sorted(manifest["files"])[ranks.rank :: ranks.size]:
            _check_file(path / name, manifest["files"][name])
        return manifest

    return ranks.together(check_share)


def _check_file(file: Path, expected: dict[str, Any]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing from the checkpoint")
    if file.stat().st_size != expected["bytes"]:
        raise CheckpointError(f"{file}: damaged: {file.stat().st_size} bytes, {expected['bytes']} were written")
    if describe_file(file) != expected:
        raise CheckpointError(f"{file}: damaged: its SHA-256 is not that of what was written")


def latest_sound(root: Path, before: int | None = None) -> Path | None:
    """The newest checkpoint whose files are all intact; damaged ones are named in a warning and passed over.

    Args:
        before: only of steps below this one.
    """
    ranks = all_ranks()
    found = [path for path in list_checkpoints(root) if before is None or checkpoint_step(path) < before]
    for path in reversed(ranks.agree(found, lambda lists: [lists[0]] * ranks.size)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s; trying the checkpoint before it", error)
            continue
        return path
    return None


def load_checkpoint(path: Path, template: T, *, device: torch.device | str = "cpu") -> T:
    """Read a state back, bit for bit, laid out as the template is; every rank of the job calls this.

    Args:
        template: a state, or a dictionary of some of its fields where the checkpoint holds no others, of the same
            structure, shapes and dtypes; on the meta device it costs no memory.

    Raises:
        CheckpointError: damage, or another shape of model or optimizer; the message names what differs.
    """
    ranks, expected = all_ranks(), tree_flatten_named(template)
    layout = ranks.together(lambda: read_layout(path))

    def judge(asked: list[tuple[list[str], list[str], list[str]]]) -> list[None]:
        _refuse_differences(path, layout, asked)
        return [None] * ranks.size

    ranks.agree((list(expected), *_differences(layout, expected)), judge)
    parts = ranks.together(lambda: read_parts(path, layout, expected, device))
    return tree_unflatten_named(template, parts)


def read_layout(path: Path) -> Layout:
    """Where every leaf of a checkpoint lies; the two-file form says so in its files' headers.

    Raises:
        CheckpointError: damage; the message names the file.
    """
    files = read_manifest(path)["files"]
    if LAYOUT not in files:
        return {**_headers(path / PARAMS, PARAMS_PREFIX), **_headers(path / REST, "")}
    file = path / LAYOUT
    _check_file(file, files[LAYOUT])
    try:
        layout = layout_from_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {error}") from None
    for name, leaf in layout.items():
        for chunk_file, _ in leaf.chunks:
            if chunk_file not in files:
                raise CheckpointError(
                    f"{file}: damaged: {name} is said to be in {chunk_file}, which is none of its files"
                )
    return layout


def _headers(file: Path, prefix: str) -> Layout:
    layout = {}
    with opened(file) as reader:
        for key in reader.keys():  # noqa: SIM118
            header = reader.get_slice(key)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            box = Box((0,) * len(shape), shape)
            layout[prefix + key] = Leaf(shape, _DTYPES.get(dtype, dtype), ((file.name, box),))
    return layout


@contextmanager
def opened(file: Path) -> Generator[Any, None, None]:
    """A safetensors file to read from; what is wrong with it is a `CheckpointError`."""
    try:
        with safe_open(file, framework="pt") as reader:
            yield reader
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing from the checkpoint") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None


def _differences(layout: Layout, expected: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """What one rank asks for that is not there, and what is there but otherwise."""
    missing = [f"{name} is missing" for name in expected if name not in layout]
    wanted = {name: Leaf(tuple(t.shape), str(t.dtype).removeprefix("torch."), ()) for name, t in expected.items()}
    other = [
        f"{name} is {layout[name]}, expected {leaf}"
        for name, leaf in wanted.items()
        if name in layout and str(layout[name]) != str(leaf)
    ]
    return missing, other


def _refuse_differences(path: Path, layout: Layout, asked: list[tuple[list[str], list[str], list[str]]]) -> None:
    """Refuse where the leaves that all ranks ask for together are not those that are there."""
    wanted = {name for names, _, _ in asked for name in names}
    unexpected = [f"{name} is not expected" for name in layout if name not in wanted]
    missing, other = ([line for rank in asked for line in rank[index]] for index in (1, 2))
    differences = list(dict.fromkeys([*missing, *unexpected, *other]))
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"{path}: the checkpoint is of another model or optimizer: {'; '.join(differences[:3])}{more}"
        )


def read_parts(
    path: Path, layout: Layout, expected: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Tensor]:
    """This rank's part of every leaf, laid out as in `expected`; each file that holds some of it is opened once.

    Raises:
        CheckpointError: the chunks do not contain each element of a part exactly once, or a file is damaged.
    """
    parts: dict[str, Tensor] = {}
    needed: dict[str, list[tuple[str, Box, Box]]] = {}  # file -> (leaf, what the chunk holds, what this rank holds)
    for name, like in expected.items():
        mine = part_of(name, like).box
        parts[name] = torch.empty(mine.shape, dtype=like.dtype, device=device)
        chunks = [(file, box) for file, box in layout[name].chunks if box.meet(mine).numel]
        check_tiling(f"{path}: {name}", mine, [box.meet(mine) for _, box in chunks])
        for file, box in chunks:
            needed.setdefault(file, []).append((name, box, mine))
    for file, pieces in needed.items():
        with opened(path / file) as reader:
            for name, chunk, mine in pieces:
                shared = chunk.meet(mine)
                parts[name][shared.inside(mine)].copy_(
                    _read(reader, path / file, name, chunk, shared, parts[name].dtype)
                )
    return {name: as_sharded(part, expected[name]) for name, part in parts.items()}


def read_whole(path: Path, layout: Layout, name: str) -> Tensor:
    """One leaf in full, on the CPU, whatever files its chunks lie in.

    Raises:
        CheckpointError: damage; the message names the leaf or the file.
    """
    return read_parts(path, layout, {name: empty_leaf(path, layout, name)}, "cpu")[name]


def empty_leaf(path: Path, layout: Layout, name: str) -> Tensor:
    """A leaf's shape and dtype, on the meta device.

    Raises:
        CheckpointError: the checkpoint names a dtype that does not exist.
    """
    leaf = layout[name]
    dtype = getattr(torch, leaf.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{path}: damaged: {name} is said to be of dtype {leaf.dtype}, which torch has not")
    return torch.empty(leaf.shape, dtype=dtype, device="meta")


def _read(reader: Any, file: Path, name: str, chunk: Box, wanted: Box, dtype: torch.dtype) -> Tensor:
    key = key_in_file(name)
    stored = reader.get_slice(key)
    if tuple(stored.get_shape()) != chunk.shape:
        raise CheckpointError(f"{file}: {name} is a part of {stored.get_shape()}, {list(chunk.shape)} was written")
    # A slice of a scalar is not a thing that safetensors knows.
    tensor = reader.get_tensor(key) if wanted == chunk else stored[wanted.inside(chunk)]
    if tensor.dtype != dtype:
        raise CheckpointError(f"{file}: {name} is {tensor.dtype}, {dtype} was written")
    return tensor
