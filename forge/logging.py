"""Rank-aware loggers below the name `forge`; the root logger is never touched."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping


def in_slurm_step(env: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process; an sbatch script has SLURM's other variables too."""
    return "SLURM_STEP_NODELIST" in env


def several_processes(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher started more processes than this one."""
    return env.get("WORLD_SIZE", env.get("SLURM_NTASKS", "1") if in_slurm_step(env) else "1") != "1"


def complain(message: str) -> None:
    """One line on stderr; in a job of several processes it names the rank."""
    rank = f" (rank {process_rank()})" if several_processes() else ""
    print(f"error{rank}: " + " ".join(message.split("\n")), file=sys.stderr, flush=True)


def process_rank() -> int:
    """The rank of this process as the launcher set it (`RANK`, else `SLURM_PROCID`), 0 when alone."""
    for variable in ("RANK", "SLURM_PROCID"):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 0


class _OnlyRankZero(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return process_rank() == 0


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time, so redirection and capture work."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger(name: str, rank_zero_only: bool = True) -> logging.Logger:
    """Return the logger for a module.

    Args:
        name: usually `__name__`; names outside `forge` are placed below it.
        rank_zero_only: drop the records of every rank but 0.
    """
    parent = logging.getLogger("forge")
    if not parent.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
        parent.addHandler(handler)
        parent.setLevel(logging.INFO)
        parent.propagate = False
    logger = logging.getLogger(name if name.split(".")[0] == "forge" else f"forge.{name}")
    if rank_zero_only and not any(isinstance(f, _OnlyRankZero) for f in logger.filters):
        logger.addFilter(_OnlyRankZero())
    return logger
