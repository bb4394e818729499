"""Run folders for the tests, as `forge.metrics.sinks` and `forge.training` write them."""

from __future__ import annotations

import json
from pathlib import Path


def write_run(folder: Path, lines, *, config="", samples=(), tail="") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (folder / "config.toml").write_text(config)
    if samples:
        text = "".join(json.dumps({"step": step, "text": text}) + "\n" for step, text in samples)
        (folder / "samples.jsonl").write_text(text)
    return folder


def losses(steps, value):
    return [{"step": step, "train/loss": value(step), "train/lr": 1e-3} for step in steps]
