"""The page of all config keys, made from the config classes: `docs/reference/keys.md`."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

import attrs

from forge.config import OPTIMIZERS, SCHEDULERS, DataPhase, DataSource, EvalSource, FreezeStage, JobConfig

TABLES = {"train.freeze": FreezeStage, "data.sources": DataSource, "data.phases": DataPhase, "eval.sets": EvalSource}
HEAD = """# Config keys

Written by the test suite (`tests/test_docs.py`) from the config classes. A key `section.name` stands in a preset as
`name` under `[section]`, and on the command line as `--section.name VALUE`; dashes and underscores mean the same. A
switch takes no value there: `--train.compile`, `--train.no-compile`. Tables are given in a preset only.
"""


def field_docs(kind: type) -> dict[str, str]:
    """Field name -> the string below it in the class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for before, node in zip(tree.body, tree.body[1:], strict=False):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(text, str):
            docs[before.target.id] = " ".join(text.split())
    return docs


def page() -> str:
    """The whole page."""
    parts = [HEAD, _section("", JobConfig)]
    for field in attrs.fields(JobConfig):
        if field.name == "optimizer":
            parts += [_section(f"optimizer: {name}", kind) for name, kind in OPTIMIZERS.items()]
        elif field.name == "scheduler":
            parts += [_section(f"scheduler: {name}", kind) for name, kind in SCHEDULERS.items()]
        elif field.name != "run_dir":
            parts += _with_nested(type(getattr(JobConfig(), field.name)))
    return "\n".join(parts)


def _with_nested(kind: Any) -> list[str]:
    parts = [_section(kind.SECTION, kind)]
    parts += [_section(f"[[{key}]]", table) for key, table in TABLES.items() if key.startswith(f"{kind.SECTION}.")]
    for field in attrs.fields(kind):
        if isinstance(field.default, attrs.Factory) and attrs.has(field.default.factory):
            parts += _with_nested(field.default.factory)
    return parts


def _section(title: str, kind: Any) -> str:
    docs = field_docs(kind)
    rows = [(f, docs[f.name]) for f in attrs.fields(kind) if f.name in docs and "." not in f.name]
    about = (kind.__doc__ or "").strip().splitlines()[0]
    lines = [f"\n## {title}\n" if title else "", about, "", "| key | default | meaning |", "| --- | --- | --- |"]
    prefix = f"{kind.SECTION}." if kind.SECTION else ""
    return "\n".join(lines + [f"| `{prefix}{f.name}` | {_default(f)} | {_cell(text)} |" for f, text in rows])


def _default(field: Any) -> str:
    value = field.default
    if value is attrs.NOTHING:
        return "must be given"
    if isinstance(value, attrs.Factory):
        return "of its own" if attrs.has(value.factory) else "none"
    if value is None:
        return "unset"
    if value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return re.sub(r"([\[\]|<>*^])", r"\\\1", text)
