"""`python -m benchmarks`: time forge against its peers, print the tables, write them to a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from attrs import evolve, field, frozen

from benchmarks.apart import own_version
from benchmarks.memory import peak_memory
from benchmarks.profiling import profile_step
from benchmarks.regimes import Device, Regime, regimes_for
from benchmarks.report import Result, describe_host, to_markdown, writable_folder, write_report
from benchmarks.sides import LIBRARIES, choose
from benchmarks.step import Say, time_regime
from forge.config.checks import integer, optional
from forge.config.flags import parse
from forge.errors import ForgeError, RunError


@frozen
class Options:
    """forge's training step against other loops, in one run."""

    SECTION: ClassVar[str] = ""

    regime: Literal[
        "all", "large-vocabulary", "compute-bound", "overhead-bound", "long-context", "mixture-of-experts", "muon"
    ] = "all"
    """What to time."""
    peers: str = "all"
    """Some of transformers,trainer,litgpt,torchtitan,hand-written, by commas; all = all of them that are installed."""
    repeats: int | None = field(default=None, validator=optional(integer(least=1)))
    """Turns of each side; unset = the regime's own number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto = the first CUDA device, else the CPU."""
    out: str = str(Path(__file__).parent / "results")
    """Folder for <host kind>.md, .json and .png; a single regime's files carry its name too."""
    compile: bool = False
    """forge with train.compile, and in the hand-written loop too; the peers stay as they are."""
    profile: bool = False
    """Print where the time of one forge step goes, and time nothing."""


def main(argv: Sequence[str]) -> int:
    """Run as the flags say; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks")
        device = _device(options.device)
        chosen = [r for r in regimes_for(device) if options.regime in ("all", r.name.replace(" ", "-"))]
        chosen = [evolve(regime, compiled=options.compile) for regime in chosen]
        if options.profile:
            for regime in chosen:
                print(f"one forge step, {regime.name}:\n{profile_step(regime, device)}")
            return 0
        name = "" if options.regime == "all" else f".{options.regime}"
        name += ".compiled" if options.compile else ""
        run(chosen, device, options.repeats, Path(options.out), name, options.peers)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def run(
    regimes: Sequence[Regime], device: Device, repeats: int | None, out: Path, name: str = "", peers: str = "all"
) -> list[Result]:
    """Measure the regimes, print the report and write it.

    Args:
        repeats: turns of each side; None = the regime's own number.
        out: folder, made if need be.
        name: follows the host's kind in the names of the files.
        peers: as `--peers` has them.

    Raises:
        ConfigError: an unknown peer.
        RunError: an unwritable folder, or two sides that do not compute the same.
    """
    writable_folder(out)
    host, say = describe_host(device), _progress()
    sides = {regime.name: choose(peers, regime) for regime in regimes}
    taking = {name for chosen, _ in sides.values() for name in chosen}
    host["versions"] += "".join(f", {name} {own_version(name)}" for name in LIBRARIES if name in taking)
    compiled = any(regime.compiled for regime in regimes)
    host["forge"] = "train.compile = true, block by block; as one where there are two layers" if compiled else "eager"
    results = []
    for regime in regimes:
        chosen, left_out = sides[regime.name]
        for line in left_out:
            say(line)
        results.append(_measure(regime, chosen, device, repeats or regime.repeats, say))
    if lines := [line for _, left_out in sides.values() for line in left_out]:
        host["left out"] = "; ".join(lines)
    print(to_markdown(results, host))
    for line in write_report(results, host, out, host["kind"] + name):
        say(line)
    return results


def _measure(regime: Regime, sides: Sequence[str], device: Device, repeats: int, say: Say) -> Result:
    sizes = {}
    for side in sides:
        say(f"{regime.name}: peak memory of {side}, in a process of its own")
        sizes[side] = peak_memory(regime, side, device)
    return Result(regime, time_regime(regime, sides, device, repeats, say), sizes)


def _progress() -> Say:
    """Lines on stderr, each with the seconds since the start."""
    start = time.perf_counter()
    return lambda line: print(f"[{time.perf_counter() - start:6.1f} s] {line}", file=sys.stderr, flush=True)


def _device(asked: str) -> Device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda, but torch finds no CUDA device: use --device cpu")
    return "cuda" if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()) else "cpu"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
