"""What made a run: one line of `provenance.jsonl` for each time that it was started, or rolled back.

A line governs the updates after its `step`, but for those of which a later line says the same.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import forge
from forge.config import JobConfig, config_to_dict
from forge.errors import RunError
from forge.files import parse_json, replace_file
from forge.resilience import Jumps
from forge.training.runtime import Runtime

FILE = "provenance.jsonl"
_GIT_SECONDS = 10


def record_start(run_dir: Path, config: JobConfig, runtime: Runtime, *, step: int, jumps: Jumps) -> None:
    """Append a line to the run's `provenance.jsonl`: a kill leaves the old file or the new one.

    Args:
        step: updates made before.
        jumps: rollbacks before.

    Raises:
        RunError: the file cannot be written.
    """
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "jumps": [list(jump) for jump in jumps],
        "command": sys.orig_argv,
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "cwd_git": git_state(Path.cwd()),
        **software(),
        **hardware(runtime),
        "seed": config.train.seed,
        "data_seed": config.train.data_seed,
        "config": config_to_dict(config),
    }
    path = run_dir / FILE
    try:
        before = path.read_bytes() if path.exists() else b""
        replace_file(path, before + json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir") from None


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order; none where there is no such file.

    Raises:
        RunError: the file is damaged.
    """
    path = run_dir / FILE
    try:
        return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: damaged: {error}") from None


def governing(starts: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """The line of the attempt that made update `step`, from 1."""
    return next(line for line in reversed(starts) if line["step"] < step)


def software() -> dict[str, Any]:
    """The versions that a result may depend on."""
    root = Path(forge.__file__).parent.parent
    return {
        "forge": forge.__version__,
        "forge_git": git_state(root) if (root / ".git").exists() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def hardware(runtime: Runtime) -> dict[str, Any]:
    """What the process runs on; of several alike, rank 0's."""
    on_gpu = runtime.device.type == "cuda"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": torch.cuda.get_device_name(runtime.device) if on_gpu else cpu,
        "threads": torch.get_num_threads(),
        "world_size": runtime.world_size,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder's git tree, and whether tracked files differ from it; None outside of git, or without."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    lines = done.stdout.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if done.returncode or commit is None:
        return None
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
