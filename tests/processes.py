"""Real jobs of several processes, started as a shell or srun would: nobody ends the others when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Ended(NamedTuple):
    """How one process ended."""

    status: int  # -n for one that signal n killed
    out: str
    err: str
    seconds: float  # from the call of `end`


class Job:
    """Processes by rank; what they write goes to files."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self.folder, self.processes = folder, processes

    def said(self, rank: int, stream: str = "out") -> str:
        """What a process has written so far."""
        return (self.folder / f"{rank}.{stream}").read_text()

    def until(self, text: str, rank: int = 0, stream: str = "out", seconds: float = 90) -> None:
        """Wait until a process has written the text."""
        for _ in range(int(seconds * 20)):
            if text in self.said(rank, stream):
                return
            assert self.processes[rank].poll() is None, self.said(rank, "err")
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} never wrote {text!r}: {self.said(rank)} {self.said(rank, 'err')}")

    def send(self, rank: int, number: signal.Signals) -> None:
        """A signal to one process alone."""
        self.processes[rank].send_signal(number)

    def end(self, ranks: Sequence[int] | None = None, seconds: float = 90) -> list[Ended]:
        """Wait for the processes, or some of them, and say how each ended."""
        start, ended = time.monotonic(), []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            status = self.processes[rank].wait(max(0.1, start + seconds - time.monotonic()))
            ended.append(Ended(status, self.said(rank), self.said(rank, "err"), time.monotonic() - start))
        return ended


@contextmanager
def start_job(folder: Path, argv: Sequence[object], environments: Sequence[Mapping[str, str]]) -> Generator[Job]:
    """`python *argv` once for each environment; whatever still runs at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "MASTER_")) and k not in ("RANK", "WORLD_SIZE")
    }
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = []
    try:
        for rank, environment in enumerate(environments):
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                command = [sys.executable, *map(str, argv)]
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env={**clean, **environment}, stdout=out, stderr=err)
                )
        yield Job(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def as_ranks(size: int) -> list[dict[str, str]]:
    """What torchrun would set, for processes that a shell starts."""
    port = str(free_port())
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(size)]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
