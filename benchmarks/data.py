"""`python -m benchmarks.data`: tokens a second of the data pipeline alone, against a torch DataLoader on the same file.

The DataLoader's data set slices the same memory map, the way nanoGPT does, and collates with the default function. All
sides read the same warm file, take turns, and give inputs and labels as int64; the peer shuffles by RandomSampler.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import describe_host, writable_folder
from forge.config.checks import integer
from forge.config.flags import parse
from forge.data import Batch, TokenDataset, build_batch_at, build_mixture, open_raw, prefetch
from forge.errors import ForgeError

VOCAB, EOD, DOCUMENT = 50257, 50256, 1000
SPARSE_TOKENS = 100_000_000_000


@frozen
class Options:
    """The data pipeline alone: tokens a second, and the start on 100 billion tokens."""

    SECTION: ClassVar[str] = ""

    tokens: int = field(default=100_000_000, validator=integer(least=100_000))
    """Tokens in the file, two bytes each."""
    seq_len: int = field(default=2048, validator=integer(least=1))
    """Tokens a sequence."""
    batch_size: int = field(default=64, validator=integer(least=1))
    """Sequences a batch."""
    batches: int = field(default=200, validator=integer(least=1))
    """Batches of a turn."""
    repeats: int = field(default=5, validator=integer(least=1))
    """Turns of each side."""
    out: str = str(Path(__file__).parent / "results")
    """Folder for <host kind>.data.md and .json."""


class _Slices(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of a token file, as a plain data set for the peer has them."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.tokens, self.seq_len = np.memmap(path, np.uint16, "r"), seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.seq_len
        row = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return row[:-1], row[1:]


def sides(path: Path, options: Options) -> dict[str, Callable[[], Iterable[Any]]]:
    """What is compared, by name: each makes an iterable of batches anew."""
    dataset = TokenDataset(path, (open_raw(path, "uint16", VOCAB, EOD),))

    def batch_at(isolate: bool, mixed: bool = False) -> Callable[[int], Batch]:
        return build_batch_at(
            {"a": dataset, "b": dataset} if mixed else {"": dataset},
            build_mixture([(0, (0.7, 0.3))]) if mixed else None,
            seq_len=options.seq_len,
            global_batch_size=options.batch_size,
            micro_batch_size=options.batch_size,
            data_seed=0,
            isolate_documents=isolate,
        )

    def loader(workers: int) -> Callable[[], Iterable[Any]]:
        order = torch.Generator().manual_seed(0)
        data = _Slices(path, options.seq_len)
        return lambda: DataLoader(
            data, options.batch_size, shuffle=True, num_workers=workers, generator=order, drop_last=True
        )

    plain, packed, mixed = batch_at(False), batch_at(True), batch_at(True, mixed=True)
    forever = sys.maxsize
    return {
        "forge, batch_at alone": lambda: prefetch(plain, 0, forever, 0),
        "forge, documents apart": lambda: prefetch(packed, 0, forever, 0),
        "forge, two sources, documents apart": lambda: prefetch(mixed, 0, forever, 0),
        "forge, 1 thread ahead": lambda: prefetch(plain, 0, forever, 2),
        "forge, 2 threads ahead": lambda: prefetch(plain, 0, forever, 4, workers=2),
        "DataLoader, 0 workers": loader(0),
        "DataLoader, 2 workers": loader(2),
    }


def rates(path: Path, options: Options) -> dict[str, float]:
    """Tokens a second at the median turn of each side; the first batch (starting of workers) is not timed."""
    compared = sides(path, options)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(options.repeats):
        for name, make in compared.items():
            batches = iter(make())
            next(batches)
            begun = time.perf_counter()
            count = sum(1 for _ in islice(batches, options.batches))
            seconds[name].append((time.perf_counter() - begun) / count)
            del batches
    tokens = options.batch_size * options.seq_len
    return {name: tokens / median(taken) for name, taken in seconds.items()}


def start_on_sparse(folder: Path, options: Options) -> tuple[float, float]:
    """Seconds from nothing to the first batch of 100 billion tokens, and MiB of memory (no file cache) it took."""
    path = folder / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(2 * SPARSE_TOKENS)
    before, begun = _own_mib(), time.perf_counter()
    next(iter(sides(path, options)["forge, two sources, documents apart"]()))
    return time.perf_counter() - begun, _own_mib() - before


def _own_mib() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def write_tokens(path: Path, tokens: int) -> None:
    """Random tokens, in documents of a thousand."""
    random = np.random.default_rng(0)
    ids = random.integers(0, EOD, tokens, dtype=np.uint16)
    ids[DOCUMENT - 1 :: DOCUMENT] = EOD
    ids.tofile(path)


def main(argv: Sequence[str]) -> int:
    """Run as the flags say; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks.data")
        out = writable_folder(options.out)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    host = describe_host("cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        write_tokens(path, options.tokens)
        found = rates(path, options)
        seconds, mib = start_on_sparse(Path(folder), options)
    report = _to_markdown(found, seconds, mib, host, options)
    print(report)
    (out / f"{host['kind']}.data.md").write_text(report + "\n", encoding="utf-8")
    record = {"host": host, "tokens_per_sec": found, "sparse_start_sec": seconds, "sparse_start_mib": mib}
    (out / f"{host['kind']}.data.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def _to_markdown(found: dict[str, float], seconds: float, mib: float, host: dict[str, str], options: Options) -> str:
    base = found["DataLoader, 0 workers"]
    rows = "\n".join(f"| {name} | {rate / 1e6:.1f} | {rate / base:.2f}x |" for name, rate in found.items())
    return f"""# The data pipeline alone

{host["device"]}; {host["versions"]}; load {host["load"]}.
Batches of {options.batch_size} x {options.seq_len} tokens from a warm file of {options.tokens / 1e6:.0f} million,
{options.repeats} turns of {options.batches} batches each.

| side | million tokens/s, median | over a DataLoader without workers |
| --- | --- | --- |
{rows}

From nothing to the first batch of 100 billion tokens in two sources (a sparse file of 200 GB): {seconds:.2f} s and
{mib:.0f} MiB of memory."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
