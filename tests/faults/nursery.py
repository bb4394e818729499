"""A process with everything imported that forks one trainer after another, and what asks it to.

A kill needs a process of its own; forked from a warm one it trains after some 50 ms instead of 5 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Nursery:
    """Starts trainers and waits for them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, preset: Path, log: Path, environment: Mapping[str, str] | None = None) -> int:
        """`cli.py --config preset` in a process of its own, whose number is returned; what it says is added to `log`."""
        return int(self._ask({"preset": str(preset), "log": str(log), "environment": environment or {}}))

    def wait(self, pid: int) -> int:
        """Exit status of a trainer; -n where signal n ended it."""
        return int(self._ask({"wait": pid}))

    def _ask(self, request: Mapping[str, object]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@contextmanager
def open_nursery() -> Generator[Nursery]:
    """A nursery; trainers that still run at the end are killed with it."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, __file__]
    with subprocess.Popen(
        argv, cwd=ROOT, env=clean, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield Nursery(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _serve() -> None:
    import cli  # noqa: F401
    from forge.training import run_training  # noqa: F401  loaded once, for every fork

    print("ready", flush=True)

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _train(request)
        print(pid, flush=True)


def _train(request: dict) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= request["environment"]
    import traceback

    import cli

    status = 99
    try:
        status = (cli._main_of_a_rank if "RANK" in os.environ else cli.main)(["--config", request["preset"]])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
