"""What the docs show is so: every command and program of theirs runs here, and the site is complete and of one piece.

The commands of a page run as they stand, in order, in one folder, through `cli.main` in this process. Only sizes are
other ones: `SMALL` takes the place of the model and the batch in the tiny preset and in the page's own presets.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import yaml

import cli
from forge.config import config_from_dict, save_config
from forge.config.flags import parse_job
from tests.cli_job import call
from tests.config_keys import page as config_keys
from tests.distributed.layouts import WRITE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
SMALL: dict[str, dict[str, Any]] = {
    "model": {"dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 16, "vocab_size": 257},
    "train": {"seq_len": 16, "global_batch_size": 4, "micro_batch_size": 2},
    "data": {"cache_dir": "cache"},
    "eval": {"batches": 2, "batch_size": 2, "sample_tokens": 8},
    "metrics": {"peak_tflops": 0.1},
}
TEXTS = {"notes", "books", "web", "archive"}
"""Folders of a reader's own text that pages read."""


def _blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of the fenced blocks of a page."""
    return re.findall(
        r"^```(\w+)[^\n]*\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def _small(text: str) -> dict[str, Any]:
    values = tomllib.loads(text)
    config_from_dict(values)
    return {**values, **{section: {**values.get(section, {}), **keys} for section, keys in SMALL.items()}}


def _prepare_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place like a clone: a reader's texts, and the tiny preset, made smaller and reading one of them."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))  # where tokens are kept by default
    for name in TEXTS:
        (folder / name).mkdir()
        for n in range(8):
            (folder / name / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(40)))
    preset = _small((ROOT / "configs" / "tiny.toml").read_text())
    preset["data"]["path"] = "notes"
    save_config(config_from_dict(preset), folder / "tiny-of-the-test.toml")
    monkeypatch.setattr(cli, "PRESET", folder / "tiny-of-the-test.toml")


def _run_cli(words: list[str], status: int) -> None:
    name = words[0] if words and not words[0].startswith("-") else "train"
    if any(word.startswith("configs/") for word in words):  # a large model: its flags are read, and nothing is made
        assert name in ("train", "plan")
        _parse([word for word in words if word != name])
        return
    found, out, err = call(*words)
    assert found == status, f"{words}\n{out}\n{err}"


def _parse(flags: list[str]) -> None:
    """Read the flags of a run as it would, its preset from the clone."""
    flags = [str(ROOT / word) if word.startswith("configs/") else word for word in flags]
    for own in ("--tflops", "--gpus"):
        if own in flags:
            float(flags.pop(flags.index(own) + 1))
            flags.remove(own)
    parse_job(flags, prog="", default_preset=cli.PRESET)


def _run_line(line: str) -> None:
    words = shlex.split(line, comments=True)
    expected = re.search(r"# exit status (\d)", line)
    match words:
        case ["python", "cli.py", "doctor", *flags]:  # what it says depends on the machine; see tests/test_doctor.py
            cli.parse(cli.Doctor, flags, prog="")
        case ["python", "cli.py", *rest]:
            _run_cli(rest, int(expected[1]) if expected else 0)
        case ["torchrun", "--nproc-per-node", ranks, "cli.py", *flags]:  # tests/distributed has what such runs do
            _parse(flags)
            assert int(ranks) > 1
        case ["sbatch", "scripts/slurm.sh", *flags]:  # needs a cluster; tests/test_scripts.py runs the script
            _parse(flags)
        case ["python", script] if script.startswith("examples/"):  # tests/test_examples.py runs each
            assert (ROOT / script).exists()
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case [".", ".venv/bin/activate"] | ["tensorboard", "--logdir", _]:  # a shell's state; a server without an end
            assert len(words) == 2 or Path(words[2]).is_dir()
        case ["ls" | "head" | "tail" | "cat", *_]:
            subprocess.run(words, check=True, capture_output=True)
        case _:
            pytest.fail(f"no test knows how to run {line!r}")


def _run_page(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": "docs"}
    for language, code in _blocks(page):
        if language == "sh":
            for line in filter(None, map(str.strip, code.splitlines())):
                _run_line(line)
        elif language == "toml":
            file = re.match(r"# ([\w-]+\.toml)\n", code)
            assert file, "a preset of a page begins with its file's name"
            Path(file[1]).write_text(tomli_w.dumps(_small(code)))
        elif language == "python":
            exec(compile(code, page, "exec"), namespace)
        else:
            assert language == "text"


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)])
def test_every_command_and_program_of_a_page_runs(page, tmp_path, monkeypatch):
    _prepare_folder(tmp_path, monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _run_page(page)
    finally:
        torch.set_num_threads(threads)


def test_the_table_of_config_keys_is_that_of_the_classes():
    file = DOCS / "reference" / "keys.md"
    if os.environ.get(WRITE):
        file.write_text(config_keys() + "\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == config_keys() + "\n", f"run with {WRITE}=1 to write it again"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("explanation/")])
def test_every_formula_has_its_source_and_its_function(page):
    sections = (DOCS / page).read_text(encoding="utf-8").split("\n## ")[1:]
    bare = [s.splitlines()[0] for s in sections if not re.search(r"^Source: .+", s, re.MULTILINE)]
    unnamed = [s.splitlines()[0] for s in sections if not re.search(r"^Code: `forge\.", s, re.MULTILINE)]
    assert sections and (bare, unnamed) == ([], [])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _leaves(node: Any) -> list[str]:
    if isinstance(node, str):
        return [node]
    return [leaf for child in (node.values() if isinstance(node, dict) else node) for leaf in _leaves(child)]


@pytest.mark.slow
def test_the_site_has_every_page_and_asks_no_other_host_for_anything(site):
    nav = _leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == PAGES
    for page in nav:
        html = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?([^\"'\s>]+)", html)
        links = re.findall(r"<link[^>]*>", html)
        loaded += [
            url for link in links if "canonical" not in link for url in re.findall(r"href=[\"']?([^\"'\s>]+)", link)
        ]
        assert loaded and [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles and not any(re.search(r"url\([\"']?(https?:)?//|@import", style) for style in styles)


@pytest.mark.slow
def test_the_reference_has_the_functions_that_a_loop_of_ones_own_is_made_of(site):
    training = (site / "reference" / "training.html").read_text(encoding="utf-8")
    for name in ("step.build_train_step", "grad.build_value_and_grad", "loss.build_loss_fn", "entry.run_training"):
        assert f'id="forge.training.{name}"' in training
    assert "donate" in training and "Raises" in training
