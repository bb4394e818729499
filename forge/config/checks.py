"""attrs validators whose message names the key, the value, and what would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from attrs import Attribute

from forge.errors import ConfigError, did_you_mean

Validator = Callable[[Any, "Attribute[Any]", Any], None]


def _key(instance: object, attribute: Attribute[Any]) -> str:
    section = getattr(instance, "SECTION", "")
    return f"{section}.{attribute.name}" if section else attribute.name


def integer(least: int | None = None, most: int | None = None) -> Validator:
    """An int (no bool) within [least, most]."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        wanted = _range("an integer", least, most)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{_key(instance, attribute)} must be {wanted}, got {value!r}")
        if (least is not None and value < least) or (most is not None and value > most):
            raise ConfigError(f"{_key(instance, attribute)} must be {wanted}, got {value}")

    return check


def number(least: float | None = None, most: float | None = None, above: float | None = None) -> Validator:
    """A finite float within [least, most], or greater than `above`."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        wanted = f"a number > {above}" if above is not None else _range("a number", least, most)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if good:
            assert isinstance(value, (int, float))
            good = (
                (least is None or value >= least)
                and (most is None or value <= most)
                and (above is None or value > above)
            )
        if not good:
            raise ConfigError(f"{_key(instance, attribute)} must be {wanted}, got {value!r}")

    return check


def _range(kind: str, least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    if least is not None:
        return f"{kind} >= {least}"
    return kind if most is None else f"{kind} <= {most}"


def one_of(*choices: str) -> Validator:
    """One of the given words."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value not in choices:
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise ConfigError(f"{_key(instance, attribute)} must be one of {', '.join(choices)}, got {value!r}{hint}")

    return check


def boolean() -> Validator:
    """True or False, not 0 or 1."""
    return instance_of(bool, "true or false")


def text() -> Validator:
    """A string with something in it: an empty path would be the current folder."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"{_key(instance, attribute)} must be a string of at least one character, got {value!r}")
        if any("\ud800" <= letter <= "\udfff" for letter in value):  # bytes of a command line that are no UTF-8
            raise ConfigError(f"{_key(instance, attribute)} must be UTF-8, got {value!r}")

    return check


def word() -> Validator:
    """A name of letters, digits, `_`, `-` and `.`: it becomes a part of the names of metrics."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(r"[\w.-]+", value):
            raise ConfigError(f"{_key(instance, attribute)} must be letters, digits, _, - or ., got {value!r}")

    return check


def optional(inner: Validator) -> Validator:
    """None, or what `inner` accepts."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if value is not None:
            inner(instance, attribute, value)

    return check


def each(inner: Validator) -> Validator:
    """A sequence (no string) of what `inner` accepts."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"{_key(instance, attribute)} must be a list, got {value!r}")
        for item in value:
            inner(instance, attribute, item)

    return check


def instance_of(kind: type, wanted: str) -> Validator:
    """An instance of a class, described in words."""

    def check(instance: object, attribute: Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{_key(instance, attribute)} must be {wanted}, got {value!r}")

    return check
