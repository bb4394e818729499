"""What the pages say is so: their code runs, their commands parse, and what they name exists."""

from __future__ import annotations

import functools
import importlib.util
import math
import pydoc
import re
import shlex
import sys
from pathlib import Path

import attrs
import pytest
import torch

from forge.config import OPTIMIZERS, SCHEDULERS, JobConfig, NoSchedule, flatten_config
from forge.config.flags import parse_job, pop_flag
from forge.errors import ForgeError

ROOT = Path(__file__).parent.parent
WRITTEN = {"docs/layouts.md", "docs/reference/keys.md"}
"""Pages that the suite writes, from what it found."""


def _pages() -> dict[str, str]:
    """Those of the top and of docs/; `mkdocs build --strict` (tests/test_docs.py) follows the links of the latter."""
    at_the_top = {name: (ROOT / name).read_text(encoding="utf-8") for name in TOP}
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items() if name not in WRITTEN}
    return {**at_the_top, **{name: re.sub(r"\]\([^)]*\)", "]", text) for name, text in texts.items()}}


TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = _pages()
README = PAGES["README.md"]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SECTIONS = "model|train|optimizer|scheduler|data|eval|distributed|checkpoint|metrics|profiling"
FLAGS_OF_OTHERS = {"--compile", "--nproc-per-node", "--logdir", "--lf", "--check"}  # of tensorboard, pytest, ruff
FILES_OF_A_RUN = {"config.toml"}
WRONG = {"--train.stpes"}
"""Shown for their error."""


def _load_cli():
    spec = importlib.util.spec_from_file_location("cli_of_the_readme", ROOT / "cli.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the annotations of its classes are looked up
    spec.loader.exec_module(module)
    return module


CLI = _load_cli()


@functools.cache
def _run(code: str) -> dict:
    """The names that an example leaves; each is run once."""
    namespace: dict = {"__name__": "readme"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads mostly wait for each other
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            exec(compile(code, "README.md", "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
    return namespace


def _example(part: str) -> dict:
    """What the one example with `part` in it leaves."""
    (code,) = [code for code in EXAMPLES if part in code]
    return _run(code)


def _config_keys() -> set[str]:
    configs = [JobConfig(optimizer=kind(), scheduler=NoSchedule()) for kind in OPTIMIZERS.values()]
    configs += [JobConfig(scheduler=kind()) for kind in SCHEDULERS.values()]
    return {key for config in configs for key in flatten_config(config)}


def _dashed(names) -> set[str]:
    return {"--" + name.replace("_", "-") for name in names}


def _command_classes() -> list[type]:
    return [kind for kind in vars(CLI).values() if isinstance(kind, type) and attrs.has(kind)]


def _commands() -> list[str]:
    """What follows `python cli.py` at the top, comments and calls for help left out; test_docs.py runs those of docs/."""
    found = [line for page in map(PAGES.get, TOP) for line in re.findall(r"python cli\.py((?: +[^`\n#]+)?)", page)]
    return sorted({line.strip() for line in found if not line.rstrip().endswith("--help")})


@pytest.mark.parametrize("code", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_every_python_example_runs_on_its_own(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _run(code)
    assert list(tmp_path.iterdir()) == []


def test_the_loop_of_the_readme_learns_its_batch():
    left = _example("for _ in range(config.train.steps)")
    assert int(left["state"].step) == left["config"].train.steps
    assert float(left["result"].loss) < 0.5 * math.log(257)


@pytest.mark.parametrize("line", _commands())
def test_every_command_of_the_pages_is_understood(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, *rest = shlex.split(line) or ["train"]
    if name.startswith("-"):
        name, rest = "train", [name, *rest]
    if "--train.stpes" in rest:  # shown for its error
        with pytest.raises(ForgeError, match=r"did you mean '--train\.steps'"):
            parse_job(rest, prog="", default_preset=CLI.PRESET)
        return
    assert name in CLI.COMMANDS
    if name in ("train", "plan", "profile"):
        for own in ("--tflops", "--gpus", "--steps", "--trace"):
            _, rest = pop_flag(rest, own)
        parse_job(rest, prog="", default_preset=CLI.PRESET)
        return
    (kind,) = [kind for kind in _command_classes() if kind.__name__.lower() == name]
    CLI.parse(kind, rest, prog="")


def test_every_command_has_an_example():
    assert [name for name in CLI.COMMANDS if not re.search(rf"python cli\.py {name}\b", README)] == []


def test_every_optimizer_and_schedule_is_named():
    table = README.partition("## What it does")[2]
    assert [name for name in [*OPTIMIZERS, *SCHEDULERS] if not re.search(rf"\b{name}\b", table)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_a_page_exists(page):
    known = (
        _dashed(_config_keys()) | {"--config", "--help", "--tflops", "--gpus", "--steps", "--trace"} | FLAGS_OF_OTHERS
    )
    known |= {flag for kind in _command_classes() for flag in _dashed(f.name for f in attrs.fields(kind))}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", PAGES[page]))
    assert named - WRONG - known == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_config_key_of_a_page_exists(page):
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)`", PAGES[page]))
    assert named - _config_keys() == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_a_page_exists(page):
    in_folders = re.findall(
        r"(?<![\w/.-])((?:forge|tests|configs|benchmarks|docs|examples|scripts|\.ci)/[\w./-]*)", PAGES[page]
    )
    at_the_root = re.findall(r"(?<![\w/.*-])([\w-]+\.(?:py|toml|md|txt))\b", PAGES[page])
    made = set(re.findall(r"^# ([\w-]+\.toml)$", PAGES[page], re.MULTILINE))  # presets that a page tells to write
    named = {name.rstrip(".") for name in in_folders} | set(at_the_root) - FILES_OF_A_RUN - made
    assert (named or page.startswith("docs/")) and [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_test_of_a_page_exists(page):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", PAGES[page])
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_dotted_name_of_a_page_can_be_imported(page):
    named = set(re.findall(r"`(forge(?:\.\w+)+)`", PAGES[page]))
    assert [name for name in sorted(named) if pydoc.locate(name) is None] == []


def test_every_part_of_forge_is_in_the_picture_of_the_layers():
    picture = PAGES["ARCHITECTURE.md"].partition("## One step")[0]
    parts = [p for p in (ROOT / "forge").iterdir() if p.is_dir() or p.suffix == ".py"]
    parts = [p for p in parts if p.name not in ("__pycache__", "__init__.py")]
    assert [p.name for p in parts if f"forge/{p.name}" not in picture] == []
