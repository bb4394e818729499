"""Every example runs on its own, and what it shows is so."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from forge.config import ModelConfig
from forge.model import build_model, init_params

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITHIN = 300
"""Seconds, on a machine that is busy with other things; on two free cores an example takes less than 30."""


SMALLER = {"mup_transfer": "--widths 16 64 --exponents -7 -6 --steps 4"}
"""Flags of those that would take minutes."""


def _run(file: Path, folder: Path) -> str:
    command = [sys.executable, str(file), *SMALLER.get(file.stem, "").split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def _fewer_at_the_end(out: str) -> None:
    losses = _numbers(r"loss (\d+\.\d+)", out)
    assert losses[-1] < losses[0]


def _custom_loop(out: str) -> None:
    assert out.endswith("the same bits: True\n")


def _per_sample_gradients(out: str) -> None:
    assert _numbers(r"noise scale (\d+\.\d+)", out)[0] > 0


def _lr_sweep(out: str) -> None:
    assert "best: 1e-02" in out  # neither end of the range


def _finetune_frozen(out: str) -> None:
    moved = dict(re.findall(r"^([\w.]+): moved by (\d\.\d+)$", out, re.MULTILINE))
    still = {name for name, by in moved.items() if float(by) == 0}
    assert still == {"embed.weight", "blocks.0.attn.wq.weight"}  # block 1 joins at step 10
    assert len(moved) == 5


def _mixture_annealing(out: str) -> None:
    assert "'train/tokens/mail': 2560.0" in out and out.splitlines()[-1].find("'train/tokens/mail': 0.0") > 0


def _scaling_ladder(out: str) -> None:
    assert _numbers(r"N\^(-?\d+\.\d+)", out)[0] < 0


def _mup_transfer(out: str) -> None:
    standard, mup = _numbers(r"logits of the widest move (\d+\.\d+)", out)
    assert standard > 2 > mup
    assert re.findall(r"(\w+) +width +(\d+): best", out) == [
        ("standard", "16"), ("standard", "64"), ("muP", "16"), ("muP", "64"),
    ]  # fmt: skip


def _fsdp2_four_processes(out: str) -> None:
    pairs = re.findall(r"loss (\S+) on one process, (\S+) on four", out)
    assert len(pairs) == 6
    for one, four in pairs:
        assert float(one) == pytest.approx(float(four), rel=1e-5)


def _logit_lens(out: str) -> None:
    assert [line.split()[0] for line in out.splitlines()] == ["after", *(f"blocks.{layer}" for layer in range(4))]


SHOWS = {
    "custom_loop": _custom_loop,
    "finetune_frozen": _finetune_frozen,
    "fsdp2_four_processes": _fsdp2_four_processes,
    "logit_lens": _logit_lens,
    "lr_sweep": _lr_sweep,
    "mixture_annealing": _mixture_annealing,
    "moe": _fewer_at_the_end,
    "mup_transfer": _mup_transfer,
    "new_optimizer": _fewer_at_the_end,
    "per_sample_gradients": _per_sample_gradients,
    "scaling_ladder": _scaling_ladder,
}


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_shows_what_it_says(file, tmp_path):
    SHOWS[file.stem](_run(file, tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_lens_at_the_last_block_is_the_model(tied):
    lens = runpy.run_path(str(ROOT / "examples" / "logit_lens.py"), run_name="example")["logit_lens"]
    config = ModelConfig(dim=16, n_layers=3, n_heads=2, vocab_size=19, logit_softcap=5.0, tied_embeddings=tied)
    model, ids = build_model(config), torch.arange(12).view(2, 6)
    params = init_params(model, config, seed=0)
    layers = lens(model, params, ids)
    assert list(layers) == ["blocks.0", "blocks.1", "blocks.2"]
    expected = functional_call(model, params, (ids,))
    torch.testing.assert_close(layers["blocks.2"], expected)
    assert not torch.allclose(layers["blocks.1"], expected)


def test_the_readme_links_to_every_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES if f"examples/{file.name}" not in readme] == []
