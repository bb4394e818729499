"""What ranks tell each other while they run, and what follows from it: which of them hung, and where."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TypeVar

from attrs import asdict, frozen

T = TypeVar("T", "Report", "Failure")


@frozen
class Report:
    """What a rank says of itself."""

    tick: int  # rises with every report: a rank that is stopped or dead has no new one
    beats: int  # how often its main thread went on to something else
    doing: str  # since the last beat
    idle: float  # seconds since then
    place: str = ""  # where the main thread is; known of one that is idle for too long
    collective: bool = False  # whether it waits for other ranks there
    who: str = ""  # host and process


@frozen
class Failure:
    """Why the job ends."""

    line: str
    status: int  # to exit with
    hung: Sequence[int] = ()  # ranks
    silent: bool = False  # whether these do not answer

    @property
    def absent(self) -> int:
        """Ranks that will not read this."""
        return len(self.hung) if self.silent else 0


class Still:
    """For how many seconds a value has not changed, counting the time that is given."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._value: object = None

    def see(self, value: object, passed: float) -> float:
        """Look at the value, `passed` seconds after the last time."""
        self.seconds = self.seconds + passed if value == self._value else 0.0
        self._value = value
        return self.seconds


def judge(seen: Mapping[int, tuple[Report, float]], limit: float, silence: float) -> Failure | None:
    """Which ranks hold the job up; None while nobody was idle or silent for too long.

    A hung rank stops all others in their next collective, so that every rank is idle soon. The one to name is silent
    (its process is stopped or gone), else one of `held_up_by`.

    Args:
        seen: by rank, its newest report, and for how many seconds there has been no newer one.
        limit: seconds without a beat, or without a report, from which on a rank has hung.
        silence: seconds without a report from which on a rank is the reason that another one is idle.
    """
    reports = {rank: report for rank, (report, _) in seen.items()}
    idle = max(report.idle for report in reports.values()) > limit
    silent = [rank for rank, (_, quiet) in seen.items() if quiet > (min(silence, limit) if idle else limit)]
    if silent:
        quiet = max(seen[rank][1] for rank in silent)
        named = name_ranks(silent, reports[silent[0]].who)
        line = f"{named} hung: no sign of life for {quiet:.0f} s, stopped, dead or out of reach"
        return Failure(line, 1, silent, silent=True)
    if not idle:
        return None
    hung = held_up_by(reports)
    first = reports[hung[0]]
    if not first.place:
        return None  # it says so in its next report, when it finds itself idle
    return Failure(
        f"{name_ranks(hung, first.who)} hung for {first.idle:.0f} s: {first.doing}, at {first.place}", 1, hung
    )


def held_up_by(reports: Mapping[int, Report]) -> list[int]:
    """The ranks with the fewest beats; of these, where possible, those that do not wait for others."""
    fewest = min(report.beats for report in reports.values())
    behind = [rank for rank, report in reports.items() if report.beats == fewest]
    return [rank for rank in behind if not reports[rank].collective] or behind


def name_ranks(ranks: Sequence[int], who: str) -> str:
    """`rank 3 (host, process 17)`, or the first few of many; `who` is the name of the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({who})"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} (the first: {who})"


def own_name() -> str:
    """Host and process of this rank."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def written(value: Report | Failure) -> str:
    """As it stands in the store."""
    return json.dumps(asdict(value))


def read_as(kind: type[T], text: bytes) -> T:
    """What `written` wrote."""
    return kind(**json.loads(text))
