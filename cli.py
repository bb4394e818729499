"""argv -> one call. `python cli.py` trains the tiny preset; `python cli.py COMMAND --help` lists the flags.

Nothing here imports torch before a command needs it, so that help is instant.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from forge.config.checks import integer, number, optional
from forge.config.flags import parse, parse_job, pop_flag
from forge.errors import ConfigError, ForgeError, did_you_mean
from forge.logging import process_rank

MOST_GPUS = 10**6
PRESET = Path(__file__).parent / "configs" / "tiny.toml"


@frozen
class RunFolder:
    """Which checkpoint of which run."""

    run_dir: str = "runs/tiny"
    """Folder of a run."""
    step: int = field(default=-1, validator=integer(least=-1))
    """Checkpoint to take; -1 = the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto = the first CUDA device, else the CPU."""


@frozen
class Eval(RunFolder):
    """Held-out loss of a trained model."""

    batches: int = field(default=1_000_000, validator=integer(least=1))
    """Most batches; the set is finite and taken whole by default."""


@frozen
class Generate(RunFolder):
    """Text from a trained model."""

    prompt: str = "def "
    """What the model continues."""
    max_new_tokens: int = field(default=400, validator=integer(least=0))
    """Tokens to generate."""
    temperature: float = field(default=0.8, validator=number(least=0))
    """Divides the logits; 0 = the likeliest token."""
    top_k: int | None = field(default=None, validator=optional(integer(least=1)))
    """Sample from the k likeliest tokens."""
    top_p: float | None = field(default=None, validator=optional(number(least=0, most=1)))
    """Sample from the likeliest tokens that reach this probability."""
    seed: int = field(default=0, validator=integer(least=0, most=2**63 - 1))
    """Of the sampling."""


@frozen
class Prepare:
    """Text to token shards: train.bin, eval.bin and manifest.json."""

    path: str = "stdlib"
    """A text file, a folder, a glob, or 'stdlib': Python's own source."""
    out: str = "data/prepared"
    """Folder to make; it must not exist."""
    tokenizer: str = "bytes"
    """'bytes', or the path of a tokenizer.json."""
    eval_fraction: float = field(default=0.02, validator=number(least=0, most=0.5))
    """Share of the documents held out."""


def train(argv: Sequence[str]) -> None:
    """Train; in a run folder with a checkpoint, go on from it."""
    config = parse_job(argv, prog="cli.py train", default_preset=PRESET)
    from forge.training import run_training

    run_training(config)


def evaluate(argv: Sequence[str]) -> None:
    """Held-out loss of a trained model."""
    args = parse(Eval, argv, prog="cli.py eval")
    from forge.training.loop import describe_eval
    from forge.training.reload import evaluate_run

    metrics = evaluate_run(args.run_dir, step=args.step, device=args.device, batches=args.batches)
    print(f"{args.run_dir} step {metrics['step']:.0f}: {describe_eval(metrics)} | {metrics['eval/tokens']:.0f} tokens")


def generate(argv: Sequence[str]) -> None:
    """Text from a trained model."""
    args = parse(Generate, argv, prog="cli.py generate")
    from forge.training.progress import visible
    from forge.training.reload import generate_from_run

    text = generate_from_run(
        args.run_dir,
        step=args.step,
        device=args.device,
        prompt=args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    print(visible(text) if sys.stdout.isatty() else text)


def prepare(argv: Sequence[str]) -> None:
    """Text to token shards."""
    args = parse(Prepare, argv, prog="cli.py prepare")
    from forge.data import build_tokenizer
    from forge.data import prepare as prepare_folder
    from forge.training.progress import counting_progress

    with counting_progress("tokenising documents") as progress:
        manifest = prepare_folder(
            args.path,
            Path(args.out),
            build_tokenizer(args.tokenizer),
            eval_fraction=args.eval_fraction,
            progress=progress,
        )
    tokens = {split: sum(entry.tokens for entry in manifest.of(split).values()) for split in ("train", "eval")}
    print(
        f"{args.out}: {tokens['train']} tokens to train on, {tokens['eval']} held out;"
        f" use it with --data.path {args.out} --data.tokenizer {args.tokenizer}"
    )


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


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "prepare": prepare,
    "plan": plan,
}
LATER = ("replay", "export", "import", "doctor")


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status: 0, 2 for a mistake of the user's, 128 + n for signal n."""
    try:
        command, rest = _command(argv)
        command(rest)
        sys.stdout.flush()
    except ForgeError as error:
        _complain(" ".join(str(error).split("\n")))
        return error.exit_status
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        _complain(f"out of memory: {_OUT_OF_MEMORY}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `cli.py generate | head`: nobody reads any more, and nothing may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _complain(message: str) -> None:
    """One line on stderr; in a job of several processes it names the rank."""
    rank = f" (rank {process_rank()})" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"error{rank}: {message}", file=sys.stderr)


_OUT_OF_MEMORY = "lower --train.micro-batch-size, or --train.activation-checkpointing full; see `cli.py plan`"


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator gave up; told by name, because torch is not imported here."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: " in str(error)


def _command(argv: Sequence[str]) -> tuple[Callable[[Sequence[str]], None], Sequence[str]]:
    """The command that the first word names; train where it is a flag or absent."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        return train, argv
    if argv[0] in ("-h", "--help"):
        return _help, argv
    if argv[0] in LATER:
        raise ConfigError(f"{argv[0]} is not in this version; there are {', '.join(COMMANDS)}")
    if argv[0] not in COMMANDS:
        raise ConfigError(
            f"unknown command {argv[0]!r}{did_you_mean(argv[0], COMMANDS)}; there are {', '.join(COMMANDS)}"
        )
    return COMMANDS[argv[0]], argv[1:]


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
    sys.exit(main(sys.argv[1:]))
