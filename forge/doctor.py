"""What `cli.py doctor` looks at: whether this machine can carry a run, and what to do where it cannot."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attrs import frozen

from forge.distributed.launch import find_launch
from forge.errors import RunError

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
MIB, GIB = 2**20, 2**30
ALL_REDUCE_SECONDS = 120.0
OPEN_FILES = 1024
"""A run opens its token files, sockets to other ranks, and little more."""


@frozen
class Finding:
    """The outcome of one check, as a line."""

    state: Literal["ok", "note", "BAD"]  # fine; works, with a drawback; breaks a run
    text: str


def examine(run_dir: Path) -> Iterator[Finding]:
    """Look at one thing after the other; takes some seconds, and leaves nothing behind.

    Args:
        run_dir: where runs will write; need not exist.
    """
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    checks: list[Callable[[], Finding]] = [
        check_versions, check_cpu, check_cuda, check_launcher, check_gloo, check_nccl, lambda: check_disk(folder),
        lambda: check_clock(folder), lambda: check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        lambda: check_shared_memory(Path("/dev/shm"), torch.cuda.device_count()),
    ]  # fmt: skip
    for check in checks:
        yield check()


def check_versions(pyproject: Path = PYPROJECT) -> Finding:
    """Python and every package that forge needs, against the lower bounds in pyproject.toml."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    needed = [f"python{project['requires-python']}", *project["dependencies"]]
    wrong = []
    for name, bound in (need.split(">=") for need in needed):
        found = python_version() if name == "python" else _installed(name)
        if found is None or _release(found) < _release(bound):
            wrong.append(f"{name} {found or 'is missing'} (needed: {bound} or newer)")
    if wrong:
        return Finding("BAD", f"versions: {', '.join(wrong)}: install with pip install -c constraints.txt -e .")
    return Finding(
        "ok", f"versions: python {python_version()}, torch {torch.__version__}, {len(needed) - 2} more packages"
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def check_cpu() -> Finding:
    """More threads than cores wait for each other."""
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    text = f"CPU: {cores} cores, {threads} threads a process"
    if threads > cores:
        return Finding("note", f"{text}: more threads than cores are slow; set OMP_NUM_THREADS={cores}")
    return Finding("ok", text)


def check_cuda() -> Finding:
    """Devices, driver and free memory; a GPU that torch cannot use is the usual mistake."""
    present = Path("/dev/nvidiactl").exists()
    if not torch.cuda.is_available():
        if present and torch.version.cuda is None:
            return Finding("BAD", "CUDA: there is a GPU, but this torch has no CUDA: install one from pytorch.org")
        if present:
            return Finding(
                "BAD", f"CUDA: there is a GPU, but torch cannot use it: its driver must know CUDA {torch.version.cuda}"
            )
        return Finding("ok", "CUDA: no GPU; runs use the CPU")
    shown = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        shown.append(f"{torch.cuda.get_device_name(index)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
        if free < 0.8 * total:
            return Finding("note", f"CUDA: {shown[-1]}, device {index}, is in use by another process; see nvidia-smi")
    return Finding("ok", f"CUDA {torch.version.cuda}: {', '.join(shown)}")


def check_launcher() -> Finding:
    """The variables by which torchrun or srun tells a process its rank."""
    try:
        place = find_launch()
    except RunError as error:
        return Finding("BAD", f"launcher: {error}")
    return Finding("ok", f"launcher: process {place.rank} of {place.world_size}")


def check_gloo() -> Finding:
    """Two processes on this machine add a number, over the CPU."""
    return _all_reduce("gloo", 2, "set GLOO_SOCKET_IFNAME to a network interface that works, as lo")


def check_nccl() -> Finding:
    """The same over the first two GPUs, or the only one."""
    if not torch.cuda.is_available():
        return Finding("ok", "all-reduce by NCCL: no GPU to do it on")
    return _all_reduce("nccl", min(2, torch.cuda.device_count()), "run with NCCL_DEBUG=INFO to see why")


def _all_reduce(backend: str, size: int, remedy: str) -> Finding:
    start, spawn = time.monotonic(), mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=_add, args=(backend, rank, size, folder), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, start + ALL_REDUCE_SECONDS - time.monotonic()))
        states = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
    text = f"all-reduce by {backend}: {size} processes"
    if states != [0] * size:
        return Finding("BAD", f"{text} ended with {states}, None after {ALL_REDUCE_SECONDS:g} s: {remedy}")
    return Finding("ok", f"{text}, right in {time.monotonic() - start:.1f} s with their start")


def _add(backend: str, rank: int, size: int, folder: str) -> None:
    """One rank of `_all_reduce`; ends with an error where the sum is wrong."""
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=size)
    numbers = torch.full((1024,), rank + 1.0, device=device)
    dist.all_reduce(numbers)
    if not torch.all(numbers == size * (size + 1) / 2):
        raise SystemExit(3)
    dist.destroy_process_group()


def check_disk(folder: Path, size: int = 128 * MIB) -> Finding:
    """Whether it can be written to, how fast, and how much is free."""
    text, block = f"disk: {folder}", os.urandom(MIB)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(size // MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = size / (time.perf_counter() - start)
    except OSError as error:
        return Finding("BAD", f"{text} cannot be written ({error.strerror}): choose another --run-dir, or make room")
    free = shutil.disk_usage(folder).free
    text += f": {free / GIB:.1f} GiB free, {rate / MIB:.0f} MiB/s with fsync"
    if free < GIB:
        return Finding(
            "note", f"{text}: a checkpoint takes some 12 bytes a parameter; see `cli.py plan`, and make room"
        )
    if rate < 20 * MIB:
        return Finding("note", f"{text}: slow; use --checkpoint.async-save, or a local disk as --run-dir")
    return Finding("ok", text)


def check_clock(folder: Path) -> Finding:
    """The clock runs evenly, and the file system has the same time."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.2)
    jump = (time.time() - wall) - (time.monotonic() - steady)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            apart = Path(file.name).stat().st_mtime - time.time()
    except OSError:
        apart = 0.0  # check_disk has told
    if abs(jump) > 0.05:
        return Finding(
            "note", f"clock: it jumps ({jump:+.2f} s in 0.2 s), so times in the logs lie: let NTP slew, not step"
        )
    if abs(apart) > 2:
        return Finding(
            "note", f"clock: {folder} is {apart:+.0f} s off, so its files' times lie: run NTP on both machines"
        )
    return Finding("ok", f"clock: even, and that of {folder}")


def check_open_files(limit: int) -> Finding:
    """Files and sockets that one process may hold."""
    shown = "no limit" if limit == resource.RLIM_INFINITY else str(limit)
    if 0 <= limit < OPEN_FILES:
        return Finding("BAD", f"open files: at most {shown} a process: raise it with ulimit -n 65536")
    return Finding("ok", f"open files: {shown} a process")


def check_shared_memory(folder: Path, devices: int) -> Finding:
    """NCCL talks over it within a machine; containers often have 64 MiB."""
    if not folder.is_dir():
        return Finding("BAD" if devices > 1 else "note", f"shared memory: no {folder}: mount a tmpfs there")
    size = shutil.disk_usage(folder).total
    if size < GIB:
        remedy = "NCCL may need 1 GiB; start the container with --shm-size 8g"
        return Finding("BAD" if devices > 1 else "note", f"shared memory: {size / MIB:.0f} MiB in {folder}: {remedy}")
    return Finding("ok", f"shared memory: {size / GIB:.1f} GiB in {folder}")
