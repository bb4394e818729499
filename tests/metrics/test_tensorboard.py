"""TensorBoard itself, started on a finished run: it shows the curves that metrics.jsonl has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.browser import open_page
from tests.cli_job import call, write_job


@contextmanager
def _tensorboard(logdir: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read the folder."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0",
               "--load_fast", "false"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said = ""
            while (found := re.search(r"http://127\.0\.0\.1:\d+", said)) is None:
                line = process.stdout.readline()
                assert line, said
                said += line
            deadline = time.monotonic() + 60
            while not _ask(found.group(), "tags") and time.monotonic() < deadline:
                time.sleep(0.2)
            yield found.group()
        finally:
            process.terminate()


def _ask(address: str, what: str, **query: str):
    with urlopen(f"{address}/data/plugin/scalars/{what}?{urlencode(query)}", timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_tensorboard_shows_the_curves_of_a_finished_run(tmp_path):
    assert call("--config", write_job(tmp_path), "--metrics.tensorboard")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for key in line.keys() - {"step"}:
            logged.setdefault(key, []).append((line["step"], line[key]))
    with _tensorboard(tmp_path / "run" / "tensorboard") as address:
        (run,) = tags = _ask(address, "tags")
        assert set(tags[run]) == set(logged) and len(logged["train/loss"]) == 4
        for key in ("train/loss", "train/lr", "train/grad_norm", "train/tokens_per_sec", "eval/loss"):
            shown = _ask(address, "scalars", run=run, tag=key)
            assert [step for _, step, _ in shown] == [step for step, _ in logged[key]]
            assert [value for _, _, value in shown] == pytest.approx([value for _, value in logged[key]], rel=1e-6)
        dom, _ = open_page(address, tmp_path)
        assert "eval/loss" in dom and dom.count("<path") > 0
