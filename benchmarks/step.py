"""The clock: all sides and a large matrix product take turns, so that the machine's moods meet all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen

from benchmarks.peers import Runner, initial_weights
from benchmarks.regimes import Device, Regime, timed_precision
from benchmarks.sides import OURS, TIMED
from forge.errors import RunError

AGREEMENT_STEPS = 3
"""Updates whose losses are compared: the second depends on the first's gradient, clipping and decay."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss."""
MUON_TOLERANCE = 1e-2
"""The same after an update of Muon: forge's Newton-Schulz coefficients and dtype are not torch's."""

Say = Callable[[str], None]


@frozen
class Timings:
    """What every turn of a regime took, in turns order."""

    seconds: dict[str, tuple[float, ...]]  # by side: seconds an update
    gemm_flops: tuple[float, ...]  # FLOP/s of the matrix products
    first_losses: dict[str, float]  # by side


def time_regime(regime: Regime, names: Sequence[str], device: Device, repeats: int, say: Say) -> Timings:
    """Check that all sides compute the same, then time them turn by turn.

    Args:
        names: from `TIMED`, forge last.

    Raises:
        RunError: they do not compute the same; nothing is timed.
    """
    precision = timed_precision(device)
    weights = initial_weights(regime)
    say(f"{regime.name}: building {', '.join(names)} in {precision} on {device}")
    sides = {name: TIMED[name](regime, device, precision, weights) for name in names}
    judged = sides
    if precision != "fp32":  # in bf16 two right answers differ by more than a wrong one might
        judged = {name: TIMED[name](regime, device, "fp32", weights) for name in names}
    losses = check_agreement(regime.name, list(judged.values()), MUON_TOLERANCE if regime.optimizer == "muon" else None)
    say(f"{regime.name}: the losses of {AGREEMENT_STEPS} updates agree, the first is {losses[OURS][0]:.5f}")
    del judged, weights
    product, flops = matrix_product(device)
    turns = {name: _turn(runner, regime.steps) for name, runner in sides.items()} | {"gemm": product}
    seconds = alternate(turns, repeats, device, lambda line: say(f"{regime.name}: {line}"))
    return Timings(
        seconds={name: tuple(s / regime.steps for s in seconds[name]) for name in names},
        gemm_flops=tuple(flops / s for s in seconds["gemm"]),
        first_losses={name: found[0] for name, found in losses.items()},
    )


def check_agreement(regime: str, sides: Sequence[Runner], later: float | None = None) -> dict[str, list[float]]:
    """The losses of the first updates, by side; they are the warm-up too.

    Args:
        sides: all are compared with the last.
        later: largest relative difference after the first update; None = TOLERANCE.

    Raises:
        RunError: one differs by more than is tolerated.
    """
    losses: dict[str, list[float]] = {side.name: [] for side in sides}
    for update in range(1, AGREEMENT_STEPS + 1):
        for side in sides:
            losses[side.name].append(float(side.step()))
        ours, tolerance = losses[sides[-1].name][-1], TOLERANCE if update == 1 or later is None else later
        for name, (*_, theirs) in losses.items():
            if not abs(theirs - ours) <= tolerance * abs(ours):
                raise RunError(
                    f"{regime}: at update {update} {name}'s loss is {theirs:.6f} and {sides[-1].name}'s {ours:.6f}:"
                    " they do not compute the same thing, so nothing was timed"
                )
    return losses


def alternate(
    turns: Mapping[str, Callable[[], object]], repeats: int, device: Device, say: Say
) -> dict[str, list[float]]:
    """Seconds of each turn: all of them once for warm-up, then `repeats` rounds of one turn each, always in order."""
    for turn in turns.values():
        turn()
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(1, repeats + 1):
        for name, turn in turns.items():
            seconds[name].append(_seconds(turn, device))
        say(f"round {index} of {repeats}: " + ", ".join(f"{name} {taken[-1]:.3f} s" for name, taken in seconds.items()))
    return seconds


def _seconds(turn: Callable[[], object], device: Device) -> float:
    _wait(device)
    start = time.perf_counter()
    turn()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: Device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _turn(runner: Runner, steps: int) -> Callable[[], None]:
    def turn() -> None:
        if runner.steps is not None:
            runner.steps(steps)
            return
        for _ in range(steps):
            runner.step()

    return turn


def matrix_product(device: Device) -> tuple[Callable[[], None], float]:
    """A turn of large square products in the timed dtype, into memory that is there already; and its FLOPs."""
    size, products = (8192, 20) if device == "cuda" else (2048, 2)
    dtype = torch.bfloat16 if timed_precision(device) == "bf16" else torch.float32
    left, right = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.empty_like(left)

    def turn() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    return turn, products * 2.0 * size**3
