"""JobConfig <-> TOML. Unknown keys, wrong types and impossible values are one-line `ConfigError`s."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal, get_origin

import attrs
import cattrs
import tomli_w
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from forge.config.job import JobConfig
from forge.config.optimizer import OPTIMIZERS, AdamW, OptimizerConfig
from forge.config.scheduler import SCHEDULERS, Cosine, SchedulerConfig
from forge.errors import ConfigError, ForgeError, did_you_mean
from forge.files import replace_file


def load_config(path: str | Path) -> JobConfig:
    """Read a preset.

    Raises:
        ConfigError: the file cannot be read or parsed, or names an unknown key or an impossible value.
    """
    path = Path(path)
    try:
        return config_from_dict(parse_toml(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; presets are in configs/") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: it is no TOML; says why, and not of which file.
        OSError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors begin with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # tomllib has its own error, but not for these: long integers, depth
        raise ConfigError(f"not valid TOML: {error}") from None


def save_config(config: JobConfig, path: str | Path) -> None:
    """Write every key that is set, so that `load_config` gives the same config back; the file is whole or as it was.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(Path(path), config_to_toml(config).encode())


def config_to_toml(config: JobConfig) -> str:
    """The config as TOML."""
    return tomli_w.dumps(config_to_dict(config))


def config_to_dict(config: JobConfig) -> dict[str, Any]:
    """Nested plain dicts; None is written as the word 'none', which TOML can hold and `config_from_dict` reads."""
    return _write_none(attrs.asdict(config, recurse=True))


def config_from_dict(values: dict[str, Any]) -> JobConfig:
    """Structure nested dicts as read from TOML.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a wrong type, or an impossible value.
    """
    try:
        return _converter().structure(values, JobConfig)
    except ForgeError:
        raise
    except Exception as error:
        raise _explain(error, JobConfig, "") from None


def diff_configs(old: JobConfig, new: JobConfig) -> dict[str, tuple[Any, Any]]:
    """`section.key -> (old, new)` for every key that differs."""
    left, right = _flatten(config_to_dict(old)), _flatten(config_to_dict(new))
    keys = sorted(left.keys() | right.keys())
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def flatten_config(config: JobConfig) -> dict[str, Any]:
    """`section.key -> value`, the form that trackers take as hyper-parameters."""
    return _flatten(config_to_dict(config))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        flat.update(_flatten(value, name)) if isinstance(value, dict) else flat.update({name: value})
    return flat


def _write_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _write_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_write_none(item) for item in value]
    return "none" if value is None else value


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _structure_scalar)
    converter.register_structure_hook_func(
        lambda kind: get_origin(kind) is Literal, lambda value, _: value
    )  # the field's validator names the choices
    converter.register_structure_hook_func(
        lambda kind: _optional_scalar(kind) is not None,
        lambda value, kind: None if value in ("none", None) else _structure_scalar(value, _optional_scalar(kind)),
    )
    converter.register_structure_hook(
        OptimizerConfig, lambda value, _: _structure_variant(converter, value, "optimizer", OPTIMIZERS, AdamW)
    )
    converter.register_structure_hook(
        SchedulerConfig, lambda value, _: _structure_variant(converter, value, "scheduler", SCHEDULERS, Cosine)
    )
    return converter


def _optional_scalar(kind: Any) -> type | None:
    """int for `int | None` and so on; None for every other type."""
    members = getattr(kind, "__args__", ())
    if type(None) not in members or len(members) != 2:
        return None
    inner = next(member for member in members if member is not type(None))
    return inner if inner in (bool, int, float, str) else None


def _structure_scalar(value: Any, kind: Any) -> Any:
    """Take the value if it is of the kind; an integral float is an int (TOML reads 1e4 as a float)."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
        raise TypeError(f"must be {_KIND_NAMES[kind]}, got {value!r}")
    return value


_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _structure_variant(
    converter: cattrs.Converter, value: Any, section: str, classes: dict[str, type], default: type
) -> Any:
    """Structure a section whose `name` chooses its class."""
    if not isinstance(value, dict):
        raise TypeError(f"must be a table, got {value!r}")
    name = value.get("name", attrs.fields(default).name.default)
    kind = classes.get(name) if isinstance(name, str) else None
    if kind is None:
        hint = did_you_mean(str(name), classes)
        raise ConfigError(f"{section}.name must be one of {', '.join(classes)}, got {name!r}{hint}")
    try:
        return converter.structure(value, kind)
    except ForgeError:
        raise
    except Exception as error:
        raise _explain(error, kind, section) from None


def _explain(error: Exception, kind: type, path: str) -> ConfigError:
    """The first cause in a tree of structuring errors, as one line with the full key."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, (ClassValidationError, IterableValidationError)):
        cause = error.exceptions[0]
        if isinstance(cause, ForbiddenExtraKeysError):
            return _unknown_key(cause, path)
        for note in getattr(cause, "__notes__", ()):
            step = getattr(note, "name", getattr(note, "index", None))
            if step is not None:
                inner = f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}" if path else str(step)
                return _explain(cause, getattr(note, "type", kind), inner)
        return _explain(cause, kind, path)
    if isinstance(error, TypeError) and str(error).startswith("must be"):
        return ConfigError(f"{path} {error}")
    if isinstance(error, TypeError) and "not iterable" in str(error):
        return ConfigError(f"{path} must be a {'table' if attrs.has(kind) else 'list'}")
    if isinstance(error, AttributeError) and "no attribute 'items'" in str(error):
        return ConfigError(f"{path} must be a table")
    if isinstance(error, KeyError):
        return ConfigError(f"{path.rpartition('.')[0]}: the key {error} is missing")
    return ConfigError(f"{path or 'config'}: {error}")


def _unknown_key(error: ForbiddenExtraKeysError, path: str) -> ConfigError:
    key = sorted(error.extra_fields)[0]
    hint = did_you_mean(key, [field.name for field in attrs.fields(error.cl)])
    return ConfigError(f"unknown key {path + '.' if path else ''}{key}{hint}")
