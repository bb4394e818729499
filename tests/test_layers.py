"""A file imports only from its own layer and from layers above it in the list."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["errors", "logging", "files", "config", "report", "pytree", "model", "metrics", "data", "distributed", "training", "checkpoint",
          "resilience", "doctor", "top"]  # fmt: skip
ON_TOP = {
    "data_pipeline",
    "entry",
    "exchange",
    "loop",
    "parts",
    "plan",
    "plan_activations",
    "plan_ranks",
    "profile_run",
    "profiling",
    "progress",
    "provenance",
    "reload",
    "replay",
    "samples",
    "saving",
    "tasks",
}
"""Modules of training that sit on checkpoint and resilience."""


def _layer(module: str) -> int:
    parts = module.split(".")
    if len(parts) == 1:
        return 0
    if parts[1] == "training" and len(parts) > 2 and parts[2] in ON_TOP:
        return LAYERS.index("top")
    return LAYERS.index(parts[1])


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


FILES = sorted((ROOT / "forge").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_import_points_upward(file):
    own = _layer(_module(file))
    for name in _imports(file):
        if name.split(".")[0] == "forge":
            assert _layer(name) <= own, f"{_module(file)} imports {name}"


@pytest.mark.parametrize("file", [f for f in FILES if _layer(_module(f)) <= LAYERS.index("report")], ids=str)
def test_errors_logging_config_and_report_do_not_import_torch(file):
    assert not [name for name in _imports(file) if name.split(".")[0] in ("torch", "optree", "numpy")]


def test_help_does_not_import_torch():
    code = "import sys, cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_importing_everything_changes_no_global_setting():
    code = """
import logging, random, sys
import numpy, torch
before = (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), random.getstate(),
          numpy.random.get_state()[1].tolist(), logging.getLogger().handlers[:], logging.getLogger().level)
import importlib, pathlib
for file in sorted(pathlib.Path("forge").rglob("*.py")):
    importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
after = (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), random.getstate(),
         numpy.random.get_state()[1].tolist(), logging.getLogger().handlers[:], logging.getLogger().level)
assert before == after
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
