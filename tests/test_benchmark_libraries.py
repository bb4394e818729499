from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent.parent))  # benchmarks/ is no installed package

from benchmarks import sides
from benchmarks.apart import ROOT, environment, own_version
from benchmarks.memory import peak_memory
from benchmarks.regimes import Regime

MINUSCULE = Regime("minuscule", 61, 32, 2, 2, 8, 2, 2, 2)
FIRST_LOSSES = """
import sys
from benchmarks.peers import initial_weights, transformers_runner
from benchmarks.regimes import Regime
from benchmarks.sides import SIDES
regime = Regime("small", 61, 32, 2, 2, 8, 2, 2, 2, experts=int(sys.argv[2]))
weights = {name: 10 * weight for name, weight in initial_weights(regime).items()}
for build in (transformers_runner, SIDES[sys.argv[1]]):
    print(float(build(regime, "cpu", "fp32", weights).step()))
"""


@pytest.mark.parametrize(("name", "experts"), [("litgpt", 0), ("litgpt", 4), ("torchtitan", 0)])
def test_a_library_with_forge_weights_has_the_loss_of_transformers_where_attention_is_far_from_uniform(name, experts):
    pytest.importorskip("transformers")
    _skip_unless_installed(name)
    command = [sys.executable, "-c", FIRST_LOSSES, name, str(experts)]
    done = subprocess.run(command, cwd=ROOT, env=environment(name), capture_output=True, text=True)
    theirs, its = map(float, done.stdout.split())
    assert theirs > math.log(61) + 0.1  # no guess
    assert its == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", sides.LIBRARIES)
def test_a_library_takes_part_where_it_computes_the_same_and_is_left_out_elsewhere(name, monkeypatch):
    unfit = {"litgpt": {"optimizer": "muon"}, "torchtitan": {"experts": 4}}[name]
    monkeypatch.setattr(sides, "own_version", lambda name: "1.0")
    assert sides.choose(name, MINUSCULE) == ([name, "forge"], [])
    names, (line,) = sides.choose(name, evolve(MINUSCULE, **unfit))
    assert names == ["forge"] and f"{name} is left out: its " in line
    monkeypatch.setattr(sides, "own_version", lambda name: None)
    assert sides.choose(name, MINUSCULE)[1] == [
        f"minuscule: {name} is left out: it is not in .peers/{name} (make peers)"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sides.LIBRARIES)
def test_the_memory_of_a_library_is_that_of_its_weights_gradients_and_moments_at_least(name):
    _skip_unless_installed(name)
    regime = evolve(MINUSCULE, vocab_size=2**17, dim=64)
    assert peak_memory(regime, name, "cpu") > 4 * 2 * 2**17 * 64 * 4  # of embedding and head, in fp32


@pytest.mark.parametrize("name", sides.LIBRARIES)
def test_the_library_that_is_installed_is_the_pinned_one(name):
    _skip_unless_installed(name)
    assert f"{name}=={own_version(name)}\n" in (ROOT / "benchmarks" / f"{name}.txt").read_text()


def _skip_unless_installed(name: str) -> None:
    if own_version(name) is None:
        pytest.skip(f"{name} is not in .peers/{name} (make peers)")
