"""The clock: both sides and a large matrix product take turns, so that the machine's moods meet all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch
from attrs import frozen

from benchmarks.peers import SIDES, Runner, initial_weights
from benchmarks.regimes import Device, Regime, timed_precision
from forge.errors import RunError

AGREEMENT_STEPS = 3
"""Updates whose losses are compared: the second depends on the first's gradient, clipping and decay."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss."""

Say = Callable[[str], None]


@frozen
class Timings:
    """Seconds of every turn of a regime, in turns order: seconds an update, FLOP/s of the matrix products."""

    peer_seconds: tuple[float, ...]
    forge_seconds: tuple[float, ...]
    gemm_flops: tuple[float, ...]
    first_losses: tuple[float, float]  # transformers, forge


def time_regime(regime: Regime, device: Device, repeats: int, say: Say) -> Timings:
    """Check that both sides compute the same, then time them turn by turn.

    Raises:
        RunError: they do not compute the same; nothing is timed.
    """
    precision = timed_precision(device)
    weights = initial_weights(regime)
    say(f"{regime.name}: building both sides in {precision} on {device}")
    sides = {name: build(regime, device, precision, weights) for name, build in SIDES.items()}
    judged = sides
    if precision != "fp32":  # in bf16 two right answers differ by more than a wrong one might
        judged = {name: build(regime, device, "fp32", weights) for name, build in SIDES.items()}
    losses = check_agreement(regime.name, *judged.values())
    say(f"{regime.name}: the losses of {len(losses)} updates agree, the first is {losses[0][1]:.5f}")
    del judged, weights
    product, flops = _matrix_product(device)
    turns = {name: _turn(runner, regime.steps) for name, runner in sides.items()} | {"gemm": product}
    seconds = alternate(turns, repeats, device, lambda line: say(f"{regime.name}: {line}"))
    return Timings(
        peer_seconds=tuple(s / regime.steps for s in seconds["transformers"]),
        forge_seconds=tuple(s / regime.steps for s in seconds["forge"]),
        gemm_flops=tuple(flops / s for s in seconds["gemm"]),
        first_losses=losses[0],
    )


def check_agreement(regime: str, peer: Runner, forge: Runner) -> list[tuple[float, float]]:
    """The losses (peer, forge) of the first updates; they are the warm-up too.

    Raises:
        RunError: a pair differs by more than TOLERANCE.
    """
    pairs = []
    for update in range(1, AGREEMENT_STEPS + 1):
        theirs, ours = float(peer.step()), float(forge.step())
        if not abs(theirs - ours) <= TOLERANCE * abs(theirs):
            raise RunError(
                f"{regime}: at update {update} {peer.name}'s loss is {theirs:.6f} and {forge.name}'s {ours:.6f}:"
                " they do not compute the same thing, so nothing was timed"
            )
        pairs.append((theirs, ours))
    return pairs


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
        for _ in range(steps):
            runner.step()

    return turn


def _matrix_product(device: Device) -> tuple[Callable[[], None], float]:
    """A turn of large square products in the timed dtype, into memory that is there already; and its FLOPs."""
    size, products = (8192, 20) if device == "cuda" else (2048, 2)
    dtype = torch.bfloat16 if timed_precision(device) == "bf16" else torch.float32
    left, right = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.empty_like(left)

    def turn() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    return turn, products * 2.0 * size**3
