"""argv -> configs, by tyro. A wrong flag or value is one line that names it and the nearest right one."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import tyro

from forge.config.job import JobConfig
from forge.config.optimizer import OPTIMIZERS, ScheduleFree
from forge.config.scheduler import SCHEDULERS, NoSchedule
from forge.config.toml import flatten_config, load_config
from forge.errors import ConfigError, did_you_mean

T = TypeVar("T")


def parse_job(argv: Sequence[str], *, prog: str, default_preset: Path) -> JobConfig:
    """Defaults, then the preset (`--config`), then flags.

    `--optimizer.name` and `--scheduler.name` choose their config class before the other flags are read, so that the
    class's own defaults hold and its own flags exist.

    Raises:
        ConfigError: an unknown flag or key, a wrong type, an impossible value or combination.
    """
    preset, rest = pop_flag(argv, "--config")
    optimizer, rest = pop_flag(rest, "--optimizer.name")
    scheduler, rest = pop_flag(rest, "--scheduler.name")
    base = load_config(preset or default_preset)
    changes: dict[str, Any] = {}
    if optimizer is not None and optimizer != base.optimizer.name:
        changes["optimizer"] = _variant("optimizer.name", optimizer, OPTIMIZERS)()
        if scheduler is None and isinstance(changes["optimizer"], ScheduleFree):
            changes["scheduler"] = NoSchedule()
    if scheduler is not None and scheduler != base.scheduler.name:
        changes["scheduler"] = _variant("scheduler.name", scheduler, SCHEDULERS)()
    base = attrs.evolve(base, **changes)
    known = [f"--{key.replace('_', '-')}" for key in flatten_config(base)] + ["--config"]
    return parse(JobConfig, rest, prog=prog, default=base, known=known)


def parse(cls: type[T], argv: Sequence[str], *, prog: str, default: T | None = None, known: Sequence[str] = ()) -> T:
    """Parse the flags of an attrs class; `--help` prints and exits with 0.

    Args:
        known: flags to suggest from; without them, the class's own fields.

    Raises:
        ConfigError: an unknown flag, a stray word, or a value of the wrong type.
    """
    flags = list(known) or [f"--{field.name.replace('_', '-')}" for field in attrs.fields(cls)]  # type: ignore[arg-type]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _wide_terminal(any(word in ("-h", "--help") for word in argv)):
            found, unknown = tyro.cli(
                cls,
                args=list(argv),
                prog=prog,
                default=default,
                return_unknown_args=True,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_line(complaint.getvalue())) from None
    if unknown:
        word = unknown[0]
        if not word.startswith("-"):
            raise ConfigError(f"stray argument {word!r}: every value follows its flag")
        flag = word.split("=")[0].replace("_", "-")
        raise ConfigError(f"unknown flag {flag}{did_you_mean(flag, flags)}; --help lists them")
    assert found is not None
    return found


def pop_flag(argv: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Take `flag value` or `flag=value` out of argv; the last one counts.

    Raises:
        ConfigError: the flag has no value.
    """
    value, rest, words = None, [], iter(argv)
    for word in words:
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") != flag:
            rest.append(word)
            continue
        value = attached if equals else next(words, None)
        if value is None or value == "":
            raise ConfigError(f"{flag} needs a value")
    return value, rest


def _variant(key: str, name: str, classes: dict[str, type]) -> type:
    if name not in classes:
        raise ConfigError(f"{key} must be one of {', '.join(classes)}, got {name!r}{did_you_mean(name, classes)}")
    return classes[name]


@contextlib.contextmanager
def _wide_terminal(leave: bool) -> Any:
    """Keep tyro from folding its message: it is cut out of its box and printed as one line."""
    before = os.environ.get("COLUMNS")
    if not leave:
        os.environ["COLUMNS"] = "500"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def _first_line(box: str) -> str:
    """The first line of text in tyro's box of an error."""
    lines = [line.strip("│ \n") for line in box.splitlines() if line.startswith("│")]
    return lines[0] if lines else box.strip().splitlines()[0]
