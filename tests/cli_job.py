"""A job for the command line's tests, and calling it in this process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import cli
from forge.config import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    JobConfig,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
    save_config,
)  # fmt: skip


def write_job(folder: Path) -> Path:
    """A preset that trains in a few tenths of a second; everything it reads and writes is below `folder`."""
    text = folder / "text"
    text.mkdir()
    for n in range(8):
        (text / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    config = JobConfig(
        run_dir=str(folder / "run"),
        model=ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=257, max_seq_len=16),
        train=TrainConfig(steps=4, seq_len=16, global_batch_size=4, micro_batch_size=2),
        optimizer=AdamW(lr=1e-2),
        data=DataConfig(path=str(text), eval_fraction=0.2, cache_dir=str(folder / "cache")),
        eval=EvalConfig(interval=4, batches=2, batch_size=2),
        checkpoint=CheckpointConfig(interval=2),
        metrics=MetricsConfig(log_interval=1, tensorboard=False, peak_tflops=0.1),
    )
    save_config(config, folder / "job.toml")
    return folder / "job.toml"


def tree_of(folder: Path) -> list[tuple[str, int]]:
    paths = (path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts[:1])
    return sorted((str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in paths)


def call(*argv: object) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of the command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(word) for word in argv])
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


def refused(*argv: object) -> str:
    """The one line that the command line says of a mistake; warnings may come before it."""
    status, _, err = call(*argv)
    line = err.splitlines()[-1]
    assert status == 2 and line.startswith("error: ") and "Traceback" not in err
    return line
