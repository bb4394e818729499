"""At least 2,000 bad presets, flags and data files: each is one line that names the key or the file; nothing is written.

Every example is a right one with something wrong in it. What is accepted after all (a changed byte may do no harm) goes
as far as the first update, which is not made, and counts for nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import forge.training
import forge.training.entry as entry
from forge.metrics import count_parameters
from tests.cli_job import call, tree_of, write_job

SHARES = {
    "values": 1700,
    "odd": 150,
    "keys": 150,
    "texts": 150,
    "flags": 150,
    "data": 150,
    "combinations": 50,
    "tokens": 40,
}
SMALL = 10**6
"""Parameters of a model that an accepted config may make here."""


class Begun(Exception):
    """Training would begin now."""


@contextmanager
def untrained(folder: Path) -> Generator[Path]:
    """A good preset, whose text is tokenised already, in a process that never trains."""
    path = write_job(folder)
    run = entry.run_training

    def begin(*args):
        raise Begun

    def run_small(config):
        if count_parameters(config.model).total > SMALL:
            raise Begun
        return run(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # an accepted path may be relative
        patch.setattr(entry, "_train", begin)
        patch.setattr(forge.training, "run_training", run_small)
        assert said_of("--config", path) is None
        (path.parent / "run").rename(path.parent / "accepted")
        yield path


def said_of(*argv):
    """The one line of a refusal; None where the input is accepted."""
    try:
        status, _, err = call(*argv)
    except Begun:
        return None
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, (argv, status, err)
    return err


class Count:
    """Distinct bad inputs that were refused."""

    def __init__(self, folder):
        self.refused, self.folder = set(), folder

    def check(self, key, names, *argv):
        """Refused with one of the names in the line, and nothing written; or accepted."""
        before = tree_of(self.folder)
        said = said_of(*argv)
        if said is None:
            shutil.rmtree(self.folder / "run", ignore_errors=True)
            return
        assert tree_of(self.folder) == before
        assert any(name in said for name in names), f"{said!r} names none of {names}; {argv}"
        self.refused.add(key)


def try_examples(share, preset, strategy, check):
    """Try examples until the share of bad ones is reached."""
    count = Count(preset.parent)

    @settings(deadline=None, max_examples=int(SHARES[share] * 1.6), database=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(example=strategy)
    def attempt(example):
        if len(count.refused) < SHARES[share]:
            check(count, example)

    attempt()
    assert len(count.refused) >= SHARES[share]
    print(f"{len(count.refused)} bad {share}")
