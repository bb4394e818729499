"""Signals, the watchdog, the lock of a run folder, and what to do about bad steps."""

from forge.resilience.health import HealthCheck, build_health_check
from forge.resilience.lock import lock_run
from forge.resilience.rollback import Jumps, batch_index, jump_over
from forge.resilience.signals import Interruption, catch_signals
from forge.resilience.skips import SkipLimit, TooManySkips
from forge.resilience.watchdog import Watchdog, watch

__all__ = [
    "HealthCheck", "Interruption", "Jumps", "SkipLimit", "TooManySkips", "Watchdog", "batch_index",
    "build_health_check", "catch_signals", "jump_over", "lock_run", "watch",
]  # fmt: skip
