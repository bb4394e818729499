"""Signals are noted, not died of."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from forge.resilience import catch_signals


@pytest.fixture(autouse=True)
def _no_nohup():
    """The suite may itself have been started with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_ignored_hangup_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with catch_signals() as came:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not came


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
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


def test_all_ranks_stop_for_the_signal_of_one():
    with catch_signals() as came:
        assert came.number == 0 and not came.agree(0) and not came
        assert came.agree(signal.SIGUSR1) and came.signal == signal.SIGUSR1 and came.number == signal.SIGUSR1


def test_the_first_ctrl_c_of_a_rank_may_come_after_that_of_another():
    with catch_signals() as came:
        came.agree(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert came.signal == signal.SIGINT


def _waits(seconds, numbers, until=0.6):
    """What is called to end the process while its main thread sends itself signals and goes on regardless."""
    calls = []
    with catch_signals(seconds, lambda line, status: calls.append((line, status))):
        for number in numbers:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        end = time.monotonic() + until
        while time.monotonic() < end and not calls:
            time.sleep(0.01)
    return calls


def test_a_deadline_begins_with_the_first_signal():
    ((line, status),) = _waits(0.1, [signal.SIGTERM, signal.SIGUSR1])
    assert status == 143 and "SIGTERM" in line and "checkpoint.stop_within_seconds = 0.1" in line
    assert _waits(0.1, []) == [] == _waits(0, [signal.SIGTERM]) == _waits(60, [signal.SIGUSR1])


def test_a_second_ctrl_c_ends_a_process_whose_main_thread_does_not_hear_of_it(monkeypatch):
    monkeypatch.setattr("forge.resilience.signals.AT_ONCE_SECONDS", 0.1)
    ((line, status),) = _waits(60, [signal.SIGINT, signal.SIGINT])
    assert status == 130 and "second Ctrl-C" in line
    assert _waits(60, [signal.SIGINT]) == []
    assert "forge-signals" not in [thread.name for thread in threading.enumerate()]
