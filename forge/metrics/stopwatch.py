"""Wall clock with parts left out and reported apart."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager


class Stopwatch:
    """Seconds since the last restart without what ran in `excluded`.

    Args:
        clock: seconds, monotonic.
        wait: returns when the device has done what was asked of it, so that no work is timed in another's place.
    """

    def __init__(self, clock: Callable[[], float], wait: Callable[[], None]) -> None:
        self._clock, self._wait = clock, wait
        self._start, self._outside = clock(), 0.0
        self._inside = False
        self._apart: dict[str, float] = {}

    def restart(self) -> None:
        """Count from now."""
        self._start, self._outside = self._clock(), 0.0

    def seconds(self) -> float:
        """Seconds since the restart, excluded ones left out."""
        return self._clock() - self._start - self._outside

    @contextmanager
    def excluded(self, name: str) -> Generator[None, None, None]:
        """Leave the time inside out; within another excluded block it belongs to that one."""
        if self._inside:
            yield
            return
        self._wait()
        start, self._inside = self._clock(), True
        try:
            yield
        finally:
            self._wait()
            spent, self._inside = self._clock() - start, False
            self._outside += spent
            self._apart[name] = self._apart.get(name, 0.0) + spent

    def take_apart(self) -> dict[str, float]:
        """Excluded seconds by name since the last call."""
        apart, self._apart = self._apart, {}
        return apart
