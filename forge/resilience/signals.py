"""SIGINT, SIGTERM and SIGUSR1 ask a run to save and stop after the step that it is in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interruption:
    """Which signal came, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def catch_signals() -> Generator[Interruption, None, None]:
    """Note signals instead of dying of them; a second Ctrl-C leaves at once. Handlers are restored at the end.

    Outside the main thread Python cannot catch signals, and nothing is changed.
    """
    came = Interruption()

    def note(number: int, frame: FrameType | None) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.signal = signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
