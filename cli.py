"""argv -> one call. `python cli.py` trains the tiny preset; `python cli.py COMMAND --help` lists the flags.

Nothing here imports torch before a command needs it, so that help is instant.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import forge
from forge.config.commands import Diff, Doctor, Eval, Export, Generate, Import, Prepare, Replay, Report, RunFolder
from forge.config.flags import parse, parse_job, pop_flag
from forge.config.run import DistributedConfig
from forge.errors import ConfigError, ForgeError, RunError, Stopped, did_you_mean
from forge.logging import complain, process_rank, several_processes

MOST_GPUS = 10**6
PRESET = Path(__file__).parent / "configs" / "tiny.toml"


def train(argv: Sequence[str]) -> None:
    """Train; in a run folder with a checkpoint, go on from it."""
    config = parse_job(argv, prog="cli.py train", default_preset=PRESET)
    from forge.training import run_training

    run_training(config)


def evaluate(argv: Sequence[str]) -> None:
    """Held-out loss of a trained model, or its loss on other data, or its results on tasks."""
    args = parse(Eval, argv, prog="cli.py eval")
    if args.tasks:
        from forge.training.tasks import evaluate_tasks, format_tasks

        names = [name.strip() for name in args.tasks.split(",")]
        found = evaluate_tasks(args.run_dir, names, step=args.step, device=args.device, folder=args.tasks_path)
        print(format_tasks(args.run_dir, found))
        return
    from forge.training.loop import describe_eval
    from forge.training.reload import evaluate_run

    metrics = evaluate_run(
        args.run_dir,
        step=args.step,
        device=args.device,
        batches=args.batches,
        paths=args.path,
        distributed=_layout(args, argv),
    )
    if process_rank() == 0:
        summary, tokens = describe_eval(metrics), metrics["eval/tokens"]
        print(f"{args.run_dir} step {metrics['step']:.0f}: {summary} | {tokens:.0f} tokens")


def generate(argv: Sequence[str]) -> None:
    """Text from a trained model."""
    args = parse(Generate, argv, prog="cli.py generate")
    from forge.training.generate import Sampling
    from forge.training.progress import visible
    from forge.training.reload import generate_from_run

    made = generate_from_run(
        args.run_dir,
        step=args.step,
        device=args.device,
        prompts=_prompts(args),
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.min_p),
        max_new_tokens=args.max_new_tokens,
        samples=args.samples,
        seed=args.seed,
        stop=args.stop,
        distributed=_layout(args, argv),
    )
    if process_rank() > 0:
        return
    for place, sample in enumerate(made.samples, start=1):
        if len(made.samples) > 1:
            print(f"--- {place}")
        print(visible(sample.text) if sys.stdout.isatty() else sample.text)
    tokens = sum(sample.tokens for sample in made.samples)
    print(f"{tokens} tokens, {tokens / made.seconds:.1f} a second", file=sys.stderr)


def _prompts(args: Generate) -> list[str]:
    """Those of the command line, then those of files."""
    prompts = list(args.prompt)
    for path in args.prompt_file:
        try:
            prompts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {path}: not a readable UTF-8 text ({error})") from None
    return prompts or ["def "]


def _layout(args: RunFolder, argv: Sequence[str]) -> DistributedConfig | None:
    """The layout that flags ask for; None = that of the run."""
    return args.distributed if any(word.startswith("--distributed.") for word in argv) else None


def prepare(argv: Sequence[str]) -> None:
    """Text to token shards."""
    if sum(word == "--path" or word.startswith("--path=") for word in argv) > 1:
        raise ConfigError("--path is given more than once: name several files by a folder or a glob")
    args = parse(Prepare, argv, prog="cli.py prepare")
    from forge.data import available_cores, build_tokenizer, verify
    from forge.data import prepare as prepare_folder
    from forge.training.progress import counting_progress

    if args.verify:
        with counting_progress("checking files") as progress:
            files = verify(Path(args.verify), progress=progress).files
        print(f"{args.verify}: sound, {len(files)} files of {sum(entry.tokens for entry in files.values())} tokens")
        return
    with counting_progress("tokenising documents") as progress:
        manifest = prepare_folder(
            args.path,
            Path(args.out),
            build_tokenizer(args.tokenizer),
            eval_fraction=args.eval_fraction,
            text_key=args.text_key,
            raw_dtype=args.raw_dtype,
            shard_tokens=args.shard_tokens,
            workers=args.workers or available_cores(),
            progress=progress,
        )
    tokens = {split: sum(entry.tokens for entry in manifest.of(split).values()) for split in ("train", "eval")}
    print(
        f"{args.out}: {tokens['train']} tokens to train on, {tokens['eval']} held out;"
        f" use it with --data.path {args.out} --data.tokenizer {args.tokenizer}"
    )


def export(argv: Sequence[str]) -> None:
    """A trained model as a folder that transformers reads."""
    args = parse(Export, argv, prog="cli.py export")
    from forge.training.exchange import export_run

    print(export_run(args.run_dir, args.out, step=args.step, shard_size=args.shard_size, dtype=args.dtype))


def import_(argv: Sequence[str]) -> None:
    """A run that starts from the weights of a Hugging Face model, or of another run."""
    args = parse(Import, argv, prog="cli.py import")
    from forge.training.exchange import import_run

    print(import_run(args.path, args.run_dir, step=args.step, dtype=args.dtype))


def plan(argv: Sequence[str]) -> None:
    """Parameters, FLOPs, memory and time of a run, by calculation; takes the flags of train, --tflops and --gpus."""
    rate, rest = pop_flag(argv, "--tflops")
    gpus, rest = pop_flag(rest, "--gpus")
    if gpus is not None and not (gpus.isdecimal() and 1 <= int(gpus) <= MOST_GPUS):
        raise ConfigError(f"--gpus must be a number of GPUs from 1 to {MOST_GPUS}, got {gpus!r}")
    if rate is not None and not _is_positive(rate):
        raise ConfigError(f"--tflops must be a number > 0, got {rate!r}")
    about = (
        "--tflops RATE is what one device reaches, in 1e12 FLOP/s (default: the peak of this one). --gpus N plans each"
    )
    about += " rank of N and what it sends (default: the product of --distributed.*)."
    config = parse_job(rest, prog="cli.py plan", default_preset=PRESET, about=about)
    from forge.training.plan import format_plan, measured_tflops, plan_run
    from forge.training.plan_layout import stated_gpus
    from forge.training.plan_ranks import format_ranks, plan_ranks

    tflops, count = float(rate) if rate is not None else measured_tflops(config), int(gpus or stated_gpus(config))
    if count == 1:
        print(format_plan(plan_run(config, tflops=tflops)))
    else:
        print(format_ranks(plan_ranks(config, count, tflops=tflops)))


def replay(argv: Sequence[str]) -> int:
    """Make a step of a run again and compare it bit for bit; the exit status is 1 where anything differs."""
    args = parse(Replay, argv, prog="cli.py replay")
    from forge.training.replay import replay_step

    return 0 if replay_step(args.run_dir, args.step) else 1


def diff(argv: Sequence[str]) -> int:
    """Compare two checkpoints tensor by tensor; the exit status is 1 where any bit differs."""
    args = parse(Diff, argv, prog="cli.py diff", known=["--help"])
    if not (args.a and args.b):
        raise ConfigError("diff compares two checkpoints: cli.py diff runs/x/checkpoints/step_00000012 ANOTHER")
    from forge.checkpoint import DIFF_HEADER, diff_checkpoints, format_diff

    equal = different = 0
    for found in diff_checkpoints(Path(args.a), Path(args.b)):
        if found.same_bits:
            equal += 1
            continue
        if not different:
            print(DIFF_HEADER)
        different += 1
        print(format_diff(found))
    print(f"{different} tensors differ, {equal} are equal to the bit")
    return 1 if different else 0


def doctor(argv: Sequence[str]) -> None:
    """Look at versions, devices, communication, disk, clock and limits of this machine; one line each."""
    args = parse(Doctor, argv, prog="cli.py doctor")
    from forge.doctor import examine

    bad = 0
    for finding in examine(Path(args.run_dir)):
        print(f"{finding.state:<5}{finding.text}", flush=True)
        bad += finding.state == "BAD"
    if bad:
        raise RunError(f"{bad} of these would break a run; each line says what to do")


def report(argv: Sequence[str]) -> None:
    """Curves, config and samples of one run or several as one HTML page."""
    args = parse(Report, argv, prog="cli.py report", known=["--out", "--help"])
    if not args.runs:
        raise ConfigError("report shows one run or several: cli.py report runs/a runs/b --out report.html")
    from forge.report import read_run, write_report

    write_report([read_run(Path(run)) for run in args.runs], Path(args.out))
    print(f"{args.out}: {len(args.runs)} runs; open it in a browser")


def profile(argv: Sequence[str]) -> None:
    """Where the time of a step goes, by kind of work; takes the flags of train, --steps and --trace."""
    steps, rest = pop_flag(argv, "--steps")
    trace, rest = pop_flag(rest, "--trace")
    if steps is not None and not (steps.isdecimal() and int(steps) > 0):
        raise ConfigError(f"--steps must be an integer >= 1, got {steps!r}")
    about = "--steps N is how many are recorded (default: 3); --trace FILE reads a trace that is there, instead."
    config = parse_job(rest, prog="cli.py profile", default_preset=PRESET, about=about)
    from forge.metrics.timeline import format_timeline, read_timeline

    if trace is not None:
        print(format_timeline(read_timeline(Path(trace))))
        return
    from forge.training.profile_run import profile_run

    found = profile_run(config, int(steps or 3))
    if found is not None:
        print(f"{format_timeline(found[1])}\n\ntrace for Perfetto or chrome://tracing: {found[0]}")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "prepare": prepare,
    "plan": plan,
    "export": export,
    "import": import_,
    "replay": replay,
    "diff": diff,
    "doctor": doctor,
    "report": report,
    "profile": profile,
}


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status.

    0; 2 for a mistake of the user's; 1 where replay or diff found a difference, a rank hung or another one failed;
    128 + n for signal n.
    """
    try:
        command, rest = _command(argv)
        status = command(rest)
        sys.stdout.flush()
        return status or 0
    except ForgeError as error:
        if not (isinstance(error, Stopped) and process_rank() > 0):  # all ranks stop alike; rank 0 says so
            complain(str(error))
        return error.exit_status
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        complain(f"out of memory: {_OUT_OF_MEMORY}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `cli.py generate | head`: nobody reads any more, and nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _main_of_a_rank(argv: Sequence[str]) -> int:
    """`main` in one process of several; after a failure nothing waits at the end for ranks that are gone."""
    try:
        status = main(argv)
    except Exception as error:
        traceback.print_exc()
        complain(f"{type(error).__name__}: {error}")
        status = 1
    if status != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


_OUT_OF_MEMORY = "lower --train.micro-batch-size, or --train.activation-checkpointing full; see `cli.py plan`"


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator gave up; told by name, because torch is not imported here."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: " in str(error)


def _command(argv: Sequence[str]) -> tuple[Callable[[Sequence[str]], int | None], Sequence[str]]:
    """The command that the first word names; train where it is a flag or absent."""
    if argv and argv[0] == "--version":
        return _version, argv
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        return train, argv
    if argv[0] in ("-h", "--help"):
        return _help, argv
    if argv[0] not in COMMANDS:
        raise ConfigError(
            f"unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}; there are {', '.join(COMMANDS)}"
        )
    return COMMANDS[argv[0]], argv[1:]


def _version(_: Sequence[str]) -> None:
    print(f"forge {forge.__version__}")


def _help(argv: Sequence[str]) -> None:
    """The commands, then the flags of train."""
    print("python cli.py [COMMAND] [FLAGS]; without a command, train. COMMAND --help lists a command's flags.\n")
    for name, command in COMMANDS.items():
        print(f"  {name:<10}{(command.__doc__ or '').strip()}")
    print()
    parse_job(["--help"], prog="cli.py train", default_preset=PRESET)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a model writes may not fit the terminal's encoding
    sys.exit((_main_of_a_rank if several_processes() else main)(sys.argv[1:]))
