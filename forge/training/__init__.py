"""The training step and everything around it; `run_training(config)` is the whole of it."""

from __future__ import annotations

from typing import Any

_PUBLIC = {
    "build_loss_fn": "loss",
    "build_optimizer": "optimizer",
    "build_scheduler": "scheduler",
    "build_train_step": "step",
    "build_value_and_grad": "grad",
    "maybe_no_sync": "grad",
    "run_eval": "eval",
    "run_training": "entry",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import the module of a public name when it is first asked for: the pure half never pulls in the loop."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
