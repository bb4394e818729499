"""The command line: what each command does, with what `train` made, and how it ends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html import escape
from pathlib import Path

import attrs
import numpy as np
import pytest

import cli
from forge.checkpoint import list_checkpoints
from forge.config import JobConfig, Muon, load_config
from forge.errors import ForgeError, Stopped
from tests.cli_job import call, refused, tree_of, write_job

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def preset(tmp_path):
    return write_job(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The preset of a run with checkpoints at steps 2 and 4; tests do not write to it."""
    preset = write_job(tmp_path_factory.mktemp("trained"))
    assert call("--config", preset)[0] == 0
    return preset


def test_without_a_command_it_trains(preset):
    status, out, err = call("--config", preset, "--train.steps", "2")
    assert (status, err) == (0, "")
    assert "2 steps of 4 x 16 tokens" in out and "[step 2] loss=" in out
    assert [path.name for path in list_checkpoints(preset.parent / "run" / "checkpoints")] == ["step_00000002"]


def test_eval_reports_the_newest_or_the_asked_checkpoint(trained):
    run_dir = trained.parent / "run"
    status, newest, _ = call("eval", "--run-dir", run_dir)
    assert status == 0 and re.search(
        r"run step 4: loss \d\.\d+ \| perplexity .* \| bits per byte .* \| \d+ tokens", newest
    )
    status, older, _ = call("eval", "--run-dir", run_dir, "--step", 2, "--batches", 1)
    assert status == 0 and "step 2: loss" in older


def test_generate_continues_the_prompt_and_repeats_for_a_seed(trained):
    argv = ("generate", "--run-dir", trained.parent / "run", "--prompt", "3 times", "--max-new-tokens", 8, "--seed")
    status, first, _ = call(*argv, 1)
    assert status == 0 and first.startswith("3 times") and len(first) > len("3 times\n")
    second = call(*argv, 2)[1]
    assert call(*argv, 1)[1] == first != second
    assert call(*argv, 1, "--samples", 2)[1] == f"--- 1\n{first}--- 2\n{second}"


def test_generate_continues_prompts_and_files_and_says_how_fast(trained):
    file = trained.parent / "prompt.txt"
    file.write_text("5 times")
    argv = ("generate", "--run-dir", trained.parent / "run", "--max-new-tokens", 8, "--min-p", 0.1, "--stop", "\x00")
    status, out, err = call(*argv, "--prompt", "3 times", "--prompt-file", file, "--stop", "~")
    assert status == 0 and re.search(r"^\d+ tokens, \d+\.\d a second$", err.splitlines()[-1])
    both = re.fullmatch(r"--- 1\n(3 times.*)--- 2\n(5 times.*)", out, re.DOTALL)
    assert both is not None
    assert call(*argv, "--prompt", "3 times", "--stop", "~")[1] == both[1]
    assert call(*argv, "--prompt-file", file, "--stop", "~")[1] == both[2]


def test_prepare_makes_a_folder_that_train_reads(preset):
    out = preset.parent / "prepared"
    status, said, _ = call("prepare", "--path", preset.parent / "text", "--out", out, "--eval-fraction", 0.2)
    assert status == 0 and f"--data.path {out}" in said
    assert sorted(path.name for path in out.iterdir()) == ["eval-00000.bin", "manifest.json", "train-00000.bin"]
    status, said, _ = call("--config", preset, "--data.path", out, "--train.steps", 1)
    assert status == 0 and "[step 1] held out" in said


def test_prepare_checks_a_folder_and_names_the_damaged_file(preset):
    out = preset.parent / "prepared"
    call("prepare", "--path", preset.parent / "text", "--out", out, "--shard-tokens", 1500)
    status, said, _ = call("prepare", "--verify", out)
    assert status == 0 and f"{out}: sound, " in said
    file = out / "train-00001.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "train-00001.bin: damaged, its checksum is not the manifest's" in refused("prepare", "--verify", out)


def test_a_run_trains_on_json_lines_and_on_the_files_of_nanogpt(preset):
    folder = preset.parent
    documents = [{"body": f"{n} times {k} is {n * k}"} for n in range(9) for k in range(9)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    status, said, _ = call(
        "--config", preset, "--data.path", folder / "a.jsonl", "--data.text-key", "body", "--run-dir", folder / "a"
    )
    assert status == 0 and "[step 4] held out" in said
    for name in ("train", "val"):
        np.array([ord(c) for c in "the words of a corpus " * 20], np.uint16).tofile(folder / f"{name}.bin")
    status, said, _ = call("--config", preset, "--data.path", folder / "train.bin", "--run-dir", folder / "b")
    assert status == 0 and "[step 4] held out" in said


def test_plan_prints_every_part_and_writes_nothing(preset):
    before = tree_of(preset.parent)
    status, out, err = call("plan", "--config", preset, "--tflops", "2.5")
    assert (status, err) == (0, "")
    for part in ("parameters", "gradients", "optimizer", "activations", "FLOPs", "time", "at 2.5 TFLOP/s"):
        assert part in out
    assert tree_of(preset.parent) == before


def test_plan_of_several_gpus_says_what_a_rank_holds_and_sends(preset):
    before = tree_of(preset.parent)
    shown = []
    for flags in (["--gpus", "4", "--distributed.tp", "2"], ["--distributed.dp-shard=2", "--distributed.tp=2"]):
        status, out, err = call("plan", "--config", preset, "--tflops", "2.5", "--model.vocab-size", "258", *flags)
        assert (status, err) == (0, "") and "4 GPUs: dp_shard 2 x tp 2" in out
        shown.append(out)
    assert shown[0] == shown[1] and all(f"\n  {kind} " in out for kind in ("all-gather", "reduce-scatter", "gathered"))
    assert tree_of(preset.parent) == before


def test_replay_compares_a_step_and_exits_with_1_where_it_differs(trained, tmp_path):
    status, out, _ = call("replay", "--run-dir", trained.parent / "run")
    assert status == 0 and "steps 3 to 4 from step_00000002" in out and "step 4: grad_norm" in out
    assert re.search(r"step_00000004: all \d+ tensors: equal", out)
    shutil.copytree(trained.parent / "run", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/loss": 5.', '"train/loss": 6.'))
    status, out, _ = call("replay", "--run-dir", tmp_path / "run", "--step", 3)
    assert status == 1 and re.search(r"step 3: loss 6\.\d+: DIFFERENT, now 5\.", out)


def test_diff_shows_the_tensors_that_differ_and_exits_with_1(trained):
    a, b = (trained.parent / "run" / "checkpoints" / name for name in ("step_00000002", "step_00000004"))
    status, out, _ = call("diff", a, b)
    assert status == 1 and "max abs" in out.splitlines()[0]
    assert any(line.endswith("params/embed.weight") for line in out.splitlines())
    status, out, _ = call("diff", a, a)
    assert status == 0 and re.fullmatch(r"0 tensors differ, \d+ are equal to the bit\n", out)


def test_report_shows_the_curves_and_the_sample_of_a_run(preset, tmp_path):
    run_dir = tmp_path / "run"
    assert call("--config", preset, "--eval.sample-tokens", 8, "--eval.sample-prompt", "<b>")[0] == 0
    sample = json.loads((run_dir / "samples.jsonl").read_text())
    assert sample["step"] == 4 and sample["text"].startswith("<b>")
    status, out, err = call("report", run_dir, run_dir, "--out", tmp_path / "report.html")
    assert (status, err) == (0, "") and "2 runs" in out
    page = (tmp_path / "report.html").read_text()
    assert (
        "Training loss" in page and "Held-out loss" in page and page.count(f"<pre>{escape(sample['text'])}</pre>") == 2
    )


def test_profile_says_where_the_time_goes_and_leaves_the_run_alone(preset):
    status, out, _ = call("profile", "--config", preset, "--steps", 2)
    run_dir = preset.parent / "run"
    assert status == 0 and [path.name for path in run_dir.iterdir()] == ["profile"]
    (trace,) = (run_dir / "profile").iterdir()
    shares = {kind: float(share) for kind, share in re.findall(r"^(\w+) +[\d.]+ +([\d.]+)%$", out, re.MULTILINE)}
    assert shares["all"] == 100 and sum(shares.values()) == pytest.approx(200, abs=0.5)
    assert all(shares[kind] > 0 for kind in ("matmul", "attention", "loss", "optimizer"))
    assert "2 steps of" in out and "aten::" in out and str(trace) in out
    assert call("profile", "--trace", trace)[1] in out


TABLES = ("freeze", "moe", "sources", "phases", "anneal_weights", "sets")


def test_help_lists_every_flag_with_its_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = call("--help")
    assert status == 0
    assert all(command in out for command in cli.COMMANDS) and "--config PATH" in out
    config = load_config(cli.PRESET)
    for section in attrs.fields(JobConfig):
        value = getattr(config, section.name)
        for key in (
            [f.name for f in attrs.fields(type(value)) if f.name not in TABLES] if attrs.has(type(value)) else []
        ):
            assert f"--{section.name}.{key}".replace("_", "-") in out
    for text in ("Width of the residual stream.", "Updates in all.", "Peak learning rate of the hidden matrices.",
                 "Experts that each token is sent to.", "Share of the documents held out for evaluation.",
                 "Tensor parallel ranks.", "Updates between checkpoints", "Updates between log lines",
                 "Steps in the window", "Updates between evaluations"):  # fmt: skip
        assert text in out, text


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command):
    status, out, _ = call(command, "--help")
    assert status == 0 and f"cli.py {command}" in out
    assert ("--tflops" in out) == ("--gpus" in out) == (command == "plan")


HELP = "import sys, cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nprint('\\n', sorted({'torch', 'numpy'} & set(sys.modules)))"


def test_the_version_is_that_of_the_package():
    assert call("--version")[:2] == (0, f"forge {importlib.metadata.version('forge')}\n")


def test_help_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "[]"


def test_equals_sign_dashes_and_underscores_mean_the_same(preset):
    outs = {
        call("plan", "--config", preset, "--tflops", 1, *flags)[1]
        for flags in (
            ["--train.steps", "5", "--train.seq-len", "8"],
            ["--train.steps=5", "--train.seq_len=8"],
            ["--train.seq_len", "8", "--train.steps=5"],
        )
    }
    assert len(outs) == 1 and "160 tokens" in outs.pop()


def test_choosing_muon_keeps_its_other_defaults(preset):
    status, _, _ = call("--config", preset, "--optimizer.name", "muon", "--optimizer.lr", "0.01", "--train.steps", 1)
    written = load_config(preset.parent / "run" / "config.toml")
    assert status == 0
    assert written.optimizer == Muon(lr=0.01)


def test_the_message_survives_a_terminal_without_unicode(preset):
    done = _python("plan", "--config", preset, "--train.steps", "1e4", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert done.stderr == "error: --train.steps must be an integer, got '1e4'\n"


def _python(*argv, env=None, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "cli.py"), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, **options)


def test_running_out_of_memory_is_one_line_with_a_remedy(monkeypatch, capsys):
    def greedy(argv):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setitem(cli.COMMANDS, "train", greedy)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory: lower --train.micro-batch-size")

    def broken(argv):
        raise RuntimeError("a bug")

    monkeypatch.setitem(cli.COMMANDS, "train", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


@pytest.mark.parametrize(
    ("raised", "status", "err"),
    [
        (ForgeError("two\nlines"), 2, "error: two lines\n"),
        (Stopped(signal.SIGTERM, "saved step 3"), 143, "error: stopped by SIGTERM: saved step 3\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_exit_status_says_how_it_ended(monkeypatch, capsys, raised, status, err):
    def command(argv):
        raise raised

    monkeypatch.setitem(cli.COMMANDS, "eval", command)
    assert cli.main(["eval"]) == status
    assert capsys.readouterr().err == err


@pytest.mark.slow
def test_ctrl_c_saves_exits_with_130_and_the_same_command_goes_on(preset):
    command = [sys.executable, str(ROOT / "cli.py"), "--config", str(preset), "--train.steps", "1000000"]
    said = []
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            said.append([])
            for line in process.stdout:
                said[-1].append(line)
                if line.startswith("[step"):
                    process.send_signal(signal.SIGINT)
                    break
            _, err = process.communicate(timeout=300)
        saved = int(list_checkpoints(preset.parent / "run" / "checkpoints")[-1].name.removeprefix("step_"))
        assert process.returncode == 130
        assert (
            err
            == f"error: stopped by SIGINT: saved step {saved} in {preset.parent}/run; the same command goes on from there\n"
        )
        said[-1].append(saved)
    assert f"resuming at step {said[0][-1]}:" in "".join(said[1][:-1]) and said[1][-1] > said[0][-1]


def test_a_closed_pipe_is_silent(trained):
    command = [
        sys.executable,
        str(ROOT / "cli.py"),
        "generate",
        "--run-dir",
        str(trained.parent / "run"),
        "--max-new-tokens",
        "4",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (err, process.returncode) == (b"", 0)
