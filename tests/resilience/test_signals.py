"""Signals are noted, not died of."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from forge.resilience import catch_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted(number):
    with catch_signals() as came:
        assert not came
        os.kill(os.getpid(), number)
        assert came and came.signal == number


def test_a_second_ctrl_c_leaves_at_once():
    with pytest.raises(KeyboardInterrupt), catch_signals() as came:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came.signal == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_before_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with catch_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_nothing_is_changed():
    seen = []

    def work():
        with catch_signals() as came:
            seen.append((bool(came), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
