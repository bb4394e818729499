"""Rank-aware loggers below the name `forge`; the root logger is never touched."""

from __future__ import annotations

import logging
import os
import sys


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
