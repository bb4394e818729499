"""Signals, the watchdog, the lock of a run folder, and what to do about bad steps."""

from forge.resilience.lock import lock_run
from forge.resilience.signals import Interruption, catch_signals
from forge.resilience.skips import SkipLimit
from forge.resilience.watchdog import watch

__all__ = ["Interruption", "SkipLimit", "catch_signals", "lock_run", "watch"]
