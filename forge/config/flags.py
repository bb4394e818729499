"""argv -> configs, by tyro. A wrong flag or value is one line that names it and the nearest right one."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Generator, Sequence
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


def parse_job(argv: Sequence[str], *, prog: str, default_preset: Path, about: str = "") -> JobConfig:
    """Defaults, then the preset (`--config`), then flags.

    `--optimizer.name` and `--scheduler.name` choose their config class before the other flags are read, so that the
    class's own defaults hold and its own flags exist.

    Args:
        about: what the help says before the flags.

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
    values = flatten_config(base)
    _refuse_tables(rest, [key for key, value in values.items() if isinstance(value, list)])
    known = [_flag(key) for key in values] + ["--config"]
    preface = f"{about} --config PATH reads a preset (default: {default_preset.name}); flags win over it.".strip()
    return parse(JobConfig, rest, prog=prog, default=base, known=known, about=preface)


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    default: T | None = None,
    known: Sequence[str] = (),
    about: str = "",
) -> T:
    """Parse the flags of an attrs class; `--help` prints and exits with 0.

    Args:
        known: flags to suggest from; without them, the class's own fields.
        about: what the help says before the flags; the class's docstring where it is empty.

    Raises:
        ConfigError: an unknown flag, a stray word, or a value of the wrong type.
    """
    try:
        found, unknown = _cli(cls, argv, prog, default, about)
    except ConfigError:
        if not all(word.isprintable() for word in argv):
            _cli(cls, [_printable(word) for word in argv], prog, default, about)  # no line break cuts its message
        raise
    if unknown:
        raise _unknown(unknown[0], known or [_flag(field.name) for field in attrs.fields(cls)])  # type: ignore[arg-type]
    return found


def _cli(cls: type[T], argv: Sequence[str], prog: str, default: T | None, about: str) -> tuple[T, list[str]]:
    """tyro's result and the words that it does not know; its complaint is a `ConfigError`."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _wide_terminal(leave="-h" in argv or "--help" in argv):
            return tyro.cli(
                cls,
                args=list(argv),
                prog=prog,
                description=about or None,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_message(complaint.getvalue())) from None


def _refuse_tables(argv: Sequence[str], tables: Sequence[str]) -> None:
    """Name the keys that only TOML can hold; tyro would call them unknown."""
    for word in argv:
        key = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if key.startswith(tuple(tables)):
            raise ConfigError(f"{key} is a table: give it in the --config file, not as a flag")


def _unknown(word: str, flags: Sequence[str]) -> ConfigError:
    if word.lower() in ("true", "false"):
        return ConfigError(f"stray argument {word!r}: a switch takes no value, it is --a.switch or --a.no-switch")
    if not word.startswith("-"):
        return ConfigError(f"stray argument {word!r}: every value follows its flag")
    flag = word.partition("=")[0].replace("_", "-")
    return ConfigError(f"unknown flag {flag}{did_you_mean(flag, flags)}; --help lists them")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


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
def _wide_terminal(leave: bool) -> Generator[None, None, None]:
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


def _printable(word: str) -> str:
    return word if word.isprintable() else word.encode("unicode_escape").decode()


def _message(box: str) -> str:
    """The line below the title of tyro's box, whose lines are drawn in Unicode or, for an ASCII stdout, not at all."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()]
    title, *texts = [line for line in lines if line.strip("-")]
    if len(texts) > 1 and texts[0].startswith("Missing from"):
        return f"{texts[1].split()[0]} is missing"
    return _plainly(texts[0] if texts else title)


_PLAINLY = (
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be an integer, got \2"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 must be a number, got \2"),
    (r"Error parsing (\S+): no type matching {None}\|INT .* from \[(.*)\]\.", r"\1 must be an integer or None, got \2"),
    (r"Error parsing (\S+): no type matching {None}\|FLOAT .* from \[(.*)\]\.", r"\1 must be a number or None, got \2"),
    (r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)\.", r"\2 must be one of \3, got \1"),
    (r"Missing value for argument '(\S+)'\. Expected 1 values\.", r"\1 needs a value"),
)
"""What tyro says -> what the checks of the fields would."""


def _plainly(text: str) -> str:
    """tyro's words as ours; those that are not known here stay."""
    found = ((re.fullmatch(pattern, text), said) for pattern, said in _PLAINLY)
    return next((match.expand(said) for match, said in found if match), text)
