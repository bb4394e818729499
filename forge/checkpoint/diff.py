"""Two checkpoints, tensor by tensor, of any layouts; one tensor of each is in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Generator
from math import inf
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from forge.checkpoint.layout import Layout
from forge.checkpoint.load import read_layout, read_whole
from forge.pytree import same_bits

_CHUNK = 2**22
"""Elements that are compared at a time, in fp64."""


@frozen
class TensorDiff:
    """How a tensor of checkpoint B differs from that of A; where the shapes or dtypes differ, numbers are absent."""

    name: str  # path in the state, `params/blocks.0.attn.wq.weight`
    same_bits: bool
    kinds: tuple[str, str]  # shape and dtype in A and B; "absent" where there is none
    max_abs: float | None = None  # max |b - a|, over elements that are NaN in neither
    relative: float | None = None  # |b - a| / |a|, 2-norms without NaNs
    nans: tuple[int, int] | None = None  # in A and B
    norms: tuple[float, float] | None = None  # 2-norms, NaN where there are NaNs


def diff_checkpoints(a: Path, b: Path) -> Generator[TensorDiff, None, None]:
    """Compare every tensor of two checkpoints; checksums are not looked at, so that damage shows where it is.

    Raises:
        CheckpointError: a folder is no checkpoint, or a file is missing or unreadable.
    """
    left, right = read_layout(a), read_layout(b)
    for name in dict.fromkeys([*left, *right]):
        kinds = (_kind(left, name), _kind(right, name))
        if kinds[0] != kinds[1]:
            yield TensorDiff(name, False, kinds)
            continue
        yield _diff(name, kinds, read_whole(a, left, name), read_whole(b, right, name))


def _kind(layout: Layout, name: str) -> str:
    return str(layout[name]) if name in layout else "absent"


def _diff(name: str, kinds: tuple[str, str], a: Tensor, b: Tensor) -> TensorDiff:
    max_abs = apart = base = norm_a = norm_b = 0.0
    nans_a = nans_b = 0
    for x, y in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        gap = torch.where(x == y, 0.0, y - x)[~(x.isnan() | y.isnan())]
        max_abs = max(max_abs, float(gap.abs().max())) if gap.numel() else max_abs
        apart, base = apart + float(gap.square().sum()), base + float(x.nan_to_num(0, inf, -inf).square().sum())
        norm_a, norm_b = norm_a + float(x.square().sum()), norm_b + float(y.square().sum())
        nans_a, nans_b = nans_a + int(x.isnan().sum()), nans_b + int(y.isnan().sum())
    relative = math.sqrt(apart / base) if base else (inf if apart else 0.0)
    norms = (math.sqrt(norm_a), math.sqrt(norm_b))
    return TensorDiff(name, same_bits(a, b), kinds, max_abs, relative, (nans_a, nans_b), norms)


def format_diff(diff: TensorDiff) -> str:
    """One line of a table; the columns are those of `DIFF_HEADER`."""
    if diff.max_abs is None or diff.relative is None or diff.nans is None or diff.norms is None:
        return f"{diff.name}: {diff.kinds[0]} in A, {diff.kinds[1]} in B"
    return (
        f"{diff.max_abs:>12.4g} {diff.relative:>12.4g} {diff.nans[0]:>8} {diff.nans[1]:>8}"
        f" {diff.norms[0]:>12.6g} {diff.norms[1]:>12.6g}  {diff.name}"
    )


DIFF_HEADER = (
    f"{'max abs':>12} {'relative':>12} {'NaN in A':>8} {'NaN in B':>8} {'norm of A':>12} {'norm of B':>12}  tensor"
)
