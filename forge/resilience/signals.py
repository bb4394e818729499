"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask a run to save and stop; a deadline and a second Ctrl-C end one that does not.

Python handles a signal when the main thread comes back from what it is in, which may be a collective that never ends.
So a thread reads the signals as well, from the pipe that the interpreter writes them to.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from forge.resilience.ending import end_process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AT_ONCE_SECONDS = 1.0
"""For the main thread to leave after a second Ctrl-C; then it is ended."""


class Interruption:
    """Which signal came, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def number(self) -> int:
        """Of the signal; 0 = none."""
        return 0 if self.signal is None else int(self.signal)

    def agree(self, number: int) -> bool:
        """Take the signal that all ranks stop for; whether there is one, 0 being none."""
        if number:
            self.signal = signal.Signals(number)
        return number > 0


@contextmanager
def catch_signals(
    seconds: float = 0, end: Callable[[str, int], None] = end_process
) -> Generator[Interruption, None, None]:
    """Note signals instead of dying of them; a second Ctrl-C leaves at once. Handlers are restored at the end.

    Outside the main thread Python cannot catch signals, and nothing is changed.

    Args:
        seconds: from the first signal to the end of the process, unless this ends before; 0 = no limit.
        end: called with a line and an exit status where the process must end.
    """
    came, own = Interruption(), False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal own
        if own and number == signal.SIGINT:
            raise KeyboardInterrupt
        own = True  # the first Ctrl-C may reach this rank after that of another rank was agreed on
        came.signal = came.signal or signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # by nohup
    before = {number: signal.signal(number, note) for number in SIGNALS if number not in ignored}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_enforce, args=(reading, seconds, end), name="forge-signals", daemon=True)
    thread.start()
    try:
        yield came
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def _enforce(reading: int, seconds: float, end: Callable[[str, int], None]) -> None:
    """Read signals until the pipe is closed; end the process where one has to be left by now."""
    first, until, line, status = True, float("inf"), "", 0
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while poll.poll(None if until == float("inf") else max(0.0, 1000 * (until - time.monotonic()))):
        numbers = os.read(reading, 64)
        if not numbers:
            return
        for number in (number for number in numbers if number in SIGNALS):
            if first:
                status, first = 128 + number, False
                until = time.monotonic() + seconds if seconds else until
                line = (
                    f"stopped by {signal.Signals(number).name}; the step and its checkpoint took longer than"
                    f" checkpoint.stop_within_seconds = {seconds:g}, so the checkpoint before is the newest"
                )
            elif number == signal.SIGINT:
                until, status = time.monotonic() + AT_ONCE_SECONDS, 128 + number
                line = "stopped by a second Ctrl-C; the newest checkpoint is the one before"
    end(line, status)
