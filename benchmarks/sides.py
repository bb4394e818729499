"""Who takes turns: the peers, the hand-written loop that is the floor of overhead, and forge.

litgpt 0.5.13 and torchtitan 0.2.2 live in folders of their own (`make peers`): litgpt asks for huggingface-hub < 1.4,
where `constraints.txt` has 2.4; torchtitan imports triton even for a dense Llama, which torch for the CPU lacks. Its
0.3.0 is no side: attention is flex_attention there, which has no backward pass on a CPU, or varlen, which needs CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.apart import Drive, apart, own_version, stepwise
from benchmarks.libraries import litgpt_runner, torchtitan_runner
from benchmarks.peers import Build, forge_runner, handwritten_runner, transformers_runner
from benchmarks.regimes import Regime
from benchmarks.trainer import drive_trainer, trainer_runner
from forge.errors import ConfigError

OURS, FLOOR = "forge", "hand-written"
SIDES: dict[str, Build] = {
    "transformers": transformers_runner,
    "trainer": trainer_runner,
    "litgpt": litgpt_runner,
    "torchtitan": torchtitan_runner,
    FLOOR: handwritten_runner,
    OURS: forge_runner,
}
"""In the order of their turns."""
LIBRARIES = ("litgpt", "torchtitan")
"""Those that live in a folder of their own, and run only in processes that see it."""
APART: dict[str, Drive] = {"trainer": drive_trainer} | {name: stepwise(SIDES[name]) for name in LIBRARIES}
"""Those that are timed in a process of their own, as they run there."""
TIMED = SIDES | {name: apart(name) for name in APART}
"""All sides where they are timed."""
_UNFIT = {
    ("trainer", "muon"): "it takes one optimizer, and torch's Muon needs AdamW beside it",
    ("litgpt", "muon"): "its queries, keys and values come of one matrix, of which Muon makes one update, not three",
    ("torchtitan", "experts"): "its Llama 3 has no experts",
}
"""Who would not compute the same; litgpt under Muon drifts within the tolerance, so that the check lets it through."""


def choose(asked: str, regime: Regime) -> tuple[list[str], list[str]]:
    """The sides of a regime in their order, forge among them, and a line for each that is left out.

    Args:
        asked: names with commas between them, or all.

    Raises:
        ConfigError: a name that is none.
    """
    names = list(SIDES) if asked == "all" else [name.strip() for name in asked.split(",")]
    if unknown := [name for name in names if name not in SIDES]:
        raise ConfigError(f"peers must be all or some of {','.join(SIDES)}, got {unknown[0]!r}")
    reasons = {name: _obstacle(name, regime) for name in names}
    chosen = [name for name in SIDES if (name in names and not reasons[name]) or name == OURS]
    return chosen, [f"{regime.name}: {name} is left out: {reason}" for name, reason in reasons.items() if reason]


def peers_of(sides: Sequence[str]) -> list[str]:
    """Those that forge is compared with: neither itself nor its own model in another loop."""
    return [name for name in sides if name not in (OURS, FLOOR)]


def _obstacle(name: str, regime: Regime) -> str | None:
    kinds = {"muon": regime.optimizer == "muon", "experts": regime.experts > 0}
    if unfit := [_UNFIT[name, kind] for kind, present in kinds.items() if present and (name, kind) in _UNFIT]:
        return unfit[0]
    if name in LIBRARIES and not own_version(name):
        return f"it is not in .peers/{name} (make peers)"
    if name == "trainer" and not find_spec("accelerate"):
        return "accelerate is not installed (pip install -e '.[bench]')"
    return None
