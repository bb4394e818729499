"""Ends a job in which a rank failed, hung or vanished, with one line that names the rank, instead of waiting for ever.

The main thread of each rank beats as it goes from one thing to the next. Two threads do the rest: the courier puts a
report into the job's store every second and reads those of others, and blocks where the store does not answer; the
watcher never blocks, and decides. Rank 0 reads every report and the others that of rank 0, so that a job of any size
costs the store two requests a rank and second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from attrs import evolve

from forge.errors import ForgeError, RankError, Stopped
from forge.resilience.ending import dump_stacks, end_process, place_of
from forge.resilience.reports import Failure, Report, Still, held_up_by, judge, name_ranks, own_name, read_as, written
from forge.training.runtime import Runtime, within

POLL_SECONDS = 1.0
GRACE_SECONDS = 30.0
"""For the main thread of a rank that fails to end in order; then it is ended."""
GOODBYE_SECONDS = 5.0
"""Longest wait of rank 0, which mostly holds the store, until the others have read why the job ends."""


@contextmanager
def watch(runtime: Runtime, seconds: float | None, folder: Path) -> Generator[Watchdog, None, None]:
    """Watch this process and the others of its job; the ranks leave together, or end for the first that failed.

    Args:
        seconds: see `distributed.watchdog_seconds`.
        folder: for the stacks of a job that hangs.

    Raises:
        RankError: instead of what a collective raised because another rank is gone; names that rank.
    """
    if seconds is None:
        seconds = 600.0 if runtime.world_size > 1 else 0.0
    watchdog, stopped = Watchdog(runtime, seconds, folder), None
    watchdog.start()
    try:
        try:
            yield watchdog
        except Stopped as stop:  # of all ranks, at one step
            stopped = stop
        watchdog.leave()
    except BaseException as error:
        watchdog.mark(type(error), error, None)
        watchdog.explain(error)
        raise
    finally:
        watchdog.stop()
    if stopped is not None:
        raise stopped


class Watchdog:
    """What `watch` gives: the main thread calls `beat`, and `mark` where it fails."""

    def __init__(self, runtime: Runtime, seconds: float, folder: Path) -> None:
        self.rank, self.size, self.seconds, self.folder = runtime.rank, runtime.world_size, seconds, folder
        self.poll = min(POLL_SECONDS, seconds / 8) if seconds else POLL_SECONDS
        self._barrier, self._main = runtime.barrier, threading.get_ident()
        shared = None if runtime.store is None else dist.PrefixStore("forge", runtime.store)
        self._courier_store = None if shared is None else _connection(shared)  # each serves one thread
        self._store = None if shared is None else _connection(shared)
        self._over = threading.Event()
        self._beats, self._doing, self._rounds = 0, "", 0
        self._own, self._round, self._others = Still(), Still(), [Still() for _ in range(self.size)]
        self._reports: dict[int, Report] = {}
        self._failure: Failure | None = None  # the first of the job
        self._failing = False  # whether this rank's main thread is on its way out because of an error
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that this job needs: none, where one process has no limit."""
        work = [self._carry] if self._courier_store is not None else []
        work += [self._watch] if work or self.seconds else []
        self._threads = [threading.Thread(target=each, name=f"forge{each.__name__}", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; one that the store holds up is left behind."""
        self._over.set()
        for thread in self._threads:
            thread.join(2 * self.poll)

    def beat(self, doing: str) -> None:
        """The main thread goes on to something else; it is watched from its first beat on."""
        self._doing = doing
        self._beats += 1

    def end(self, line: str, status: int) -> None:
        """End this process now, and with it the job; for other threads than the main one."""
        self._end(Failure(f"rank {self.rank}: {line}" if self.size > 1 else line, status))

    def leave(self) -> None:
        """The end of a job that went well: no rank ends before all others are here."""
        self._barrier()
        self.stop()
        self._say_goodbye()

    def mark(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the other ranks that this one fails, before anything is torn down. An `__exit__`; suppresses nothing.

        An error of a collective is not told: its reason is another rank, see `explain`.
        """
        if error is None or isinstance(error, Stopped) or self._failing:
            return
        self._failing = True
        if self._store is not None and not _of_a_collective(error):
            status = error.exit_status if isinstance(error, ForgeError) else 1
            self._publish(Failure(f"rank {self.rank} ({own_name()}) failed: {_in_a_line(error)}", status))

    def explain(self, error: BaseException) -> None:
        """Say goodbye; where a collective failed, after finding out which rank is the reason.

        Raises:
            RankError: that rank failed, hung or is gone.
        """
        if self._store is None or isinstance(error, KeyboardInterrupt):
            return
        if not _of_a_collective(error):
            self._say_goodbye()
            return
        failure = self._reason(error)
        self._say_goodbye(without=failure.absent)
        raise RankError(failure.line) from error

    def _reason(self, error: BaseException) -> Failure:
        """Why a collective failed: what a rank said, else a rank that says nothing any more."""
        assert self._store is not None
        try:
            keys = [f"rank/{rank}" for rank in range(self.size)]
            before = self._store.multi_get(keys)
            for _ in range(4):
                said = self._store.get("failure")
                if said:
                    return read_as(Failure, said)
                time.sleep(self.poll)
            after = self._store.multi_get(keys)
        except RuntimeError:
            return Failure(f"rank 0 is gone, and the store of the job with it: {_in_a_line(error)}", 1)
        reports = {rank: read_as(Report, text) for rank, text in enumerate(after)}
        gone = [rank for rank in reports if before[rank] == after[rank] and rank != self.rank]
        reason = gone or held_up_by(reports)
        named = name_ranks(reason, reports[reason[0]].who)
        how = "died or stopped without a word" if gone else "did not come"
        return self._publish(Failure(f"{named} {how}: {_in_a_line(error)}", 1, gone, True))

    def _publish(self, failure: Failure) -> Failure:
        """Tell the job, and get what was told first."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                return read_as(Failure, self._store.compare_set("failure", "", written(failure)))
        return failure

    def _say_goodbye(self, without: int = 0) -> None:
        """Let the ranks, but for some, read why the job ends before the store is gone with rank 0; in bounded time."""
        store = self._store
        if store is None:
            return

        def count() -> None:
            until = time.monotonic() + GOODBYE_SECONDS
            with contextlib.suppress(RuntimeError):
                said = store.add("goodbyes", 1)
                while self.rank == 0 and said < self.size - without and time.monotonic() < until:
                    time.sleep(0.05)
                    said = store.add("goodbyes", 0)

        within(GOODBYE_SECONDS, count)

    def _carry(self) -> None:
        """The courier: reports to and fro."""
        store = self._courier_store
        assert store is not None
        ranks = range(self.size) if self.rank == 0 else [0]
        try:
            store.compare_set("failure", "", "")
            while not self._over.is_set():
                store.set(f"rank/{self.rank}", written(self._report()))
                failure, *reports = store.multi_get(["failure", *(f"rank/{rank}" for rank in ranks)])
                self._reports = {rank: read_as(Report, text) for rank, text in zip(ranks, reports, strict=True)}
                self._failure = read_as(Failure, failure) if failure else None
                self._rounds += 1
                self._over.wait(self.poll)
        except RuntimeError as error:
            self._failure = Failure(f"rank 0 is gone, and the store of the job with it: {_in_a_line(error)}", 1)

    def _report(self) -> Report:
        idle = self._own.seconds if self._beats else 0.0
        place, collective = place_of(self._main) if 0 < self.seconds < idle else ("", False)
        return Report(self._rounds, self._beats, self._doing, idle, place, collective, own_name())

    def _watch(self) -> None:
        """The watcher. Only time in which this process runs counts: to be stopped and go on is not to hang."""
        before, known = time.monotonic(), 0.0
        while not self._over.wait(self.poll):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.poll), now
            failure = self._failure or self._look(passed)
            if failure is not None:
                known += passed
                # The main thread may know it too, and end in better order.
                if known > (GRACE_SECONDS if self._failing else self.poll):
                    self._end(failure)

    def _look(self, passed: float) -> Failure | None:
        """What ends the job, as far as this rank can see; rank 0 sees all, the others rank 0."""
        self._own.see(self._beats, passed)
        stuck = self._round.see(self._rounds, passed)
        seen = {rank: (report, self._others[rank].see(report.tick, passed)) for rank, report in self._reports.items()}
        if not self.seconds:
            return None
        failure = None
        if self.rank == 0 or self._store is None:
            failure = judge({**seen, self.rank: (self._report(), 0.0)}, self.seconds, 4 * self.poll)
        elif seen and max(seen[0][1], stuck) > self.seconds:  # with rank 0 its store may hang
            failure = judge({0: (seen[0][0], max(seen[0][1], stuck))}, self.seconds, self.poll)
        if failure is None:
            return None
        return evolve(failure, line=f"{failure.line}; stacks of every thread are in {self.folder}")

    def _end(self, failure: Failure) -> None:
        """End this process from another thread than the main one, and the other ranks by telling them."""
        if failure.hung:
            dump_stacks(self.folder, also_on_stderr=self.rank in failure.hung)
        if not failure.hung or failure is self._failure or self.rank == 0:  # else rank 0 hung, and its store with it
            within(GOODBYE_SECONDS, lambda: self._publish(failure))
            self._say_goodbye(without=failure.absent)
        end_process(failure.line, failure.status)


def _connection(store: dist.Store) -> dist.Store:
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
    return clone


def _of_a_collective(error: BaseException) -> bool:
    """Whether torch's communication failed, which another rank is the reason of; gloo has no exception of its own."""
    text = str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text))


def _in_a_line(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, ForgeError) else f"{type(error).__name__}: {first}"
