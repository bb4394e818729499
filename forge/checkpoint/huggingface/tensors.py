"""Parameters under forge's names and tensors under a family's names: one table, both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from forge.checkpoint.huggingface.families import Family

_PARTS = 3
"""What GPT-2 packs into one tensor: query, key, value."""
_BUFFERS = re.compile(r".*(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias)")
"""Constants that older files hold beside the weights."""


class Origin(NamedTuple):
    """Where a parameter lies in a family's files."""

    tensors: tuple[str, ...]  # one, or one an expert
    stacked: bool  # the parameter is a stack of them
    transposed: bool
    part: int | None  # which of three equal parts of the last dimension


Origins = dict[str, Origin]
"""By the parameter's name."""


def origins(family: Family, params: Mapping[str, Tensor]) -> Origins:
    """The origin of every parameter; of the tensors only the shapes are read."""
    return {name: _origin(family, name, tensor) for name, tensor in params.items()}


def _origin(family: Family, name: str, tensor: Tensor) -> Origin:
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):  # a stack of experts, which is a parameter by itself
        module, kind = name, "weight"
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    layer, inner = block.groups() if block else ("", module)
    place = family.modules[inner]
    stacked = "{expert}" in place.name
    experts = range(tensor.shape[0] if stacked else 1)
    tensors = tuple(f"{place.name.format(layer=layer, expert=expert)}.{kind}" for expert in experts)
    return Origin(tensors, stacked, place.transposed and kind == "weight", place.part)


def units(found: Origins) -> dict[tuple[str, ...], list[str]]:
    """Tensors and the parameters made of them, in the smallest groups that can be converted alone."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, origin in found.items():
        groups.setdefault(origin.tensors, []).append(name)
    return groups


def to_forge(found: Origins, tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The named parameters, from a family's tensors; bit for bit."""

    def piece(tensor: Tensor, origin: Origin) -> Tensor:
        tensor = tensor if origin.part is None else tensor.chunk(_PARTS, dim=-1)[origin.part]
        return tensor.transpose(-1, -2) if origin.transposed else tensor

    params = {}
    for name in names:
        origin = found[name]
        pieces = [piece(tensors[source], origin) for source in origin.tensors]
        params[name] = torch.stack(pieces) if origin.stacked else pieces[0]
    return params


def to_family(found: Origins, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `to_forge`, for parameters that make up whole units."""

    def turned(name: str) -> Tensor:
        return params[name].transpose(-1, -2) if found[name].transposed else params[name]

    tensors: dict[str, Tensor] = {}
    for targets, names in units({name: found[name] for name in params}).items():
        pieces = [turned(name) for name in sorted(names, key=lambda name: found[name].part or 0)]
        if found[names[0]].stacked:
            tensors |= zip(targets, pieces[0].unbind(), strict=True)
        else:
            tensors[targets[0]] = torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]
    return tensors


def is_buffer(name: str) -> bool:
    """Whether a tensor of a file is a constant, and no weight."""
    return _BUFFERS.fullmatch(name) is not None
