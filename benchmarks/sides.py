"""Who takes turns: the peers, the hand-written loop that is the floor of overhead, and forge.

Tried with torch 2.13 on a CPU, and no sides: litgpt 0.5.13 asks for huggingface-hub < 1.4, where `constraints.txt` has
2.4, so that pip refuses the two together; torchtitan 0.2.2 installs, and imports triton with its experts' kernels even
for a dense Llama, which torch for the CPU does not bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.apart import Drive, apart
from benchmarks.peers import Build, forge_runner, handwritten_runner, transformers_runner
from benchmarks.regimes import Regime
from benchmarks.trainer import drive_trainer, trainer_runner
from forge.errors import ConfigError

OURS, FLOOR = "forge", "hand-written"
SIDES: dict[str, Build] = {
    "transformers": transformers_runner,
    "trainer": trainer_runner,
    FLOOR: handwritten_runner,
    OURS: forge_runner,
}
"""In the order of their turns."""
APART: dict[str, Drive] = {"trainer": drive_trainer}
"""Those that are timed in a process of their own, as they run there."""
TIMED = SIDES | {name: apart(name) for name in APART}
"""All sides where they are timed."""


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
    if name != "trainer":
        return None
    if regime.optimizer == "muon":
        return "it takes one optimizer, and torch's Muon needs AdamW beside it"
    return None if find_spec("accelerate") else "accelerate is not installed (pip install -e '.[bench]')"
