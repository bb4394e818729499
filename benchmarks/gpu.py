"""`python -m benchmarks.gpu`: MFU of whole presets on one GPU, forge and its peers one after the other."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import torch
from attrs import asdict, evolve, field, frozen
from torch import Tensor

from benchmarks.peers import batches_for, build_transformers, forge_step, handwritten_step, transformers_step
from benchmarks.regimes import Device, Precision, timed_precision
from benchmarks.report import describe_host, markdown_table, writable_folder
from forge.config import AdamW, DataConfig, JobConfig, ModelConfig, NoSchedule, TrainConfig, load_config
from forge.config.checks import integer, one_of
from forge.config.flags import parse
from forge.errors import ConfigError, ForgeError, RunError
from forge.metrics import compute_mfu, get_memory_stats, reset_peak_memory
from forge.metrics.mfu import device_peak_tflops
from forge.training.plan import plan_run

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=61, max_seq_len=16)
SEQ_LEN = 4096
MOST_SEQUENCES = 16
ROOM = 0.9
"""Of the free memory, that a plan may take: the rest is for kernels' workspaces and fragments."""
WARM_UP = 3
"""Updates before the clock, in which blocks are compiled and the optimizer's state is made."""
GIB = 2**30


@frozen
class Options:
    """MFU of presets on one GPU: forge, transformers and a hand-written loop."""

    SECTION: ClassVar[str] = ""

    presets: str = "llama_1b,llama_8b"
    """Names in configs/, with commas between them."""
    tiny: bool = False
    """A minuscule model in place of the presets, to see that all of this runs."""
    device: Literal["cuda", "cpu"] = field(default="cuda", validator=one_of("cuda", "cpu"))
    """cpu goes with --tiny only."""
    compile: bool = True
    """torch.compile, block by block, on every side."""
    cuda_graphs: bool = False
    """Time forge once more with its compiled blocks replayed as CUDA graphs."""
    steps: int = field(default=10, validator=integer(least=1))
    """Updates on the clock, a side."""
    out: str = str(Path(__file__).parent / "results")
    """Folder for <device>.mfu.md and .json."""


@frozen
class Row:
    """What one side did with one preset."""

    preset: str
    side: str
    job: str  # what was chosen for the memory
    seconds: float | None = None  # the median update; None = out of memory
    first_loss: float = 0.0
    tokens_per_sec: float = 0.0
    mfu: float = 0.0
    peak_gib: float = 0.0


def candidates(model: ModelConfig, seq_len: int, device: Device, compiled: bool) -> Iterator[list[JobConfig]]:
    """Jobs of growing batch in each list, and the lists from the fastest on: recomputation costs FLOPs."""
    sizes = [2**n for n in range(MOST_SEQUENCES.bit_length())]
    for stored in ("fp32", "bf16"):
        for recomputed in ("none", "selective", "full"):
            train = TrainConfig(
                seq_len=seq_len,
                device=device,
                precision=timed_precision(device),
                param_dtype=stored,
                activation_checkpointing=recomputed,
                compile=compiled,
                grad_clip_norm=1.0,
            )
            yield [
                JobConfig(
                    model=evolve(model, max_seq_len=seq_len),
                    data=DataConfig(isolate_documents=False),
                    train=evolve(train, global_batch_size=size, micro_batch_size=size),
                    optimizer=AdamW(),
                    scheduler=NoSchedule(),
                )
                for size in sizes
            ]


def choose_job(name: str, kinds: Iterator[list[JobConfig]], room: float) -> JobConfig:
    """The largest job that fits by its plan, of the first kind of which one does.

    Raises:
        RunError: none does.
    """

    def fits(config: JobConfig) -> bool:
        return sum(plan_run(_on_cpu(config), tflops=1.0).memory.values()) <= room

    for kind in kinds:
        if found := list(takewhile(fits, kind)):
            return found[-1]
    raise RunError(f"{name} does not fit {room / GIB:.1f} GiB, however it is cut: name a smaller preset in --presets")


def _on_cpu(config: JobConfig) -> JobConfig:
    """The same sizes, planned where no CUDA is needed."""
    return evolve(config, train=evolve(config.train, device="cpu"))


def transformers_side(
    config: JobConfig, data: Iterator[Any], device: Device, precision: Precision
) -> Callable[[], Tensor]:
    """transformers' model made on the device, in the job's dtype, its layers compiled and recomputed as forge's are."""
    with torch.device(device):
        model = build_transformers(config.model)
    model = model.to(torch.bfloat16 if config.train.param_dtype == "bf16" else torch.float32).train()
    if config.train.activation_checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers if config.train.compile else ():
        layer.compile()
    return transformers_step(model, config, data, device, precision)


def forge_side(config: JobConfig, data: Iterator[Any], device: Device, precision: Precision) -> Callable[[], Tensor]:
    """forge's own step; the config says device and precision."""
    return forge_step(config, data)


def replayed_side(config: JobConfig, data: Iterator[Any], device: Device, precision: Precision) -> Callable[[], Tensor]:
    """forge's own step with `train.cuda_graphs`."""
    return forge_step(evolve(config, train=evolve(config.train, cuda_graphs=True)), data)


SIDES: dict[str, Callable[[JobConfig, Iterator[Any], Device, Precision], Callable[[], Tensor]]] = {
    "forge": forge_side,
    "hand-written": handwritten_step,
    "transformers": transformers_side,
}
REPLAYED = {"forge, CUDA graphs": replayed_side}


def measure(preset: str, side: str, config: JobConfig, steps: int) -> Row:
    """Time a side alone on the device, which holds only one such model at a time."""
    train = config.train
    device: Device = "cuda" if train.device == "cuda" else "cpu"
    precision = timed_precision(device)
    job = f"{train.micro_batch_size} x {train.seq_len}, {train.param_dtype}, recomputed: "
    row = Row(preset, side, job + train.activation_checkpointing)
    reset_peak_memory(device)
    try:
        step = (SIDES | REPLAYED)[side](config, batches_for(config, device), device, precision)
        first, seconds = float(step()), [_seconds(step) for _ in range(WARM_UP - 1 + steps)][WARM_UP - 1 :]
    except torch.OutOfMemoryError:
        return row
    peak = device_peak_tflops(torch.device(device), torch.bfloat16 if precision == "bf16" else torch.float32)
    rate = train.global_batch_size * train.seq_len / median(seconds)
    mfu = compute_mfu(config.model, rate, gpu_peak_tflops=peak, seq_len=train.seq_len)
    return evolve(row, seconds=median(seconds), first_loss=first, tokens_per_sec=rate, mfu=mfu,
                  peak_gib=get_memory_stats(device)["peak_gb"])  # fmt: skip


def _seconds(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    float(step())  # waits for the device
    return time.perf_counter() - start


def to_markdown(rows: Sequence[Row], host: dict[str, str]) -> str:
    """The page."""
    head = ["preset", "side", "batch, parameters", "tokens/s", "MFU", "peak GiB", "first loss"]
    cells = [
        [row.preset, row.side, row.job, *(
            ["out of memory", "", "", ""] if row.seconds is None
            else [f"{row.tokens_per_sec:.0f}", f"{row.mfu:.1%}", f"{row.peak_gib:.1f}", f"{row.first_loss:.3f}"]
        )] for row in rows
    ]  # fmt: skip
    facts = "\n".join(f"- {key}: {value}" for key, value in host.items())
    return f"""# MFU of presets on one device

{facts}

MFU by PaLM's convention, of the median update. Every side has the same shapes and AdamW, and each its own initial
weights; the batch and the recomputation are the first that forge's plan fits into {ROOM:.0%} of the memory. Under bf16
parameters forge alone keeps fp32 masters and moments; the others' moments are bf16. Anchor: 57.8 % for a 7 B on one
H200.

{markdown_table(head, cells)}
"""


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks.gpu")
        models, room = _models(options), _room(options)
        out, host, rows = writable_folder(options.out), describe_host(options.device), []
        for name, model in models.items():
            seq_len = min(SEQ_LEN, model.max_seq_len)
            config = choose_job(name, candidates(model, seq_len, options.device, options.compile), room)
            for side in SIDES | (REPLAYED if options.cuda_graphs else {}):
                rows.append(measure(name, side, config, options.steps))
                torch.compiler.reset()  # what is compiled holds on to the model, whose memory the next side needs
                gc.collect()
                print(rows[-1], file=sys.stderr, flush=True)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    page = to_markdown(rows, host)
    (out / f"{host['kind']}.mfu.md").write_text(page, encoding="utf-8")
    found = json.dumps({"host": host, "rows": [asdict(row) for row in rows]}, indent=1)
    (out / f"{host['kind']}.mfu.json").write_text(found + "\n", encoding="utf-8")
    print(page)
    return 0


def _models(options: Options) -> dict[str, ModelConfig]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError("torch finds no CUDA device: run this on a GPU, or try it with --device cpu --tiny")
    if options.cuda_graphs and not (options.compile and options.device == "cuda"):
        raise ConfigError(
            "--cuda-graphs replays what is compiled, on CUDA: leave it away, or --no-compile and --device cpu"
        )
    if options.tiny:
        return {"tiny": TINY}
    if options.device == "cpu":
        raise ConfigError("--device cpu is for --tiny only: the presets are too large for a CPU")
    return {name: load_config(CONFIGS / f"{name.strip()}.toml").model for name in options.presets.split(",")}


def _room(options: Options) -> float:
    return ROOM * (torch.cuda.mem_get_info()[0] if options.device == "cuda" else GIB)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
