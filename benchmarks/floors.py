"""`python -m benchmarks.floors`: the step against its kernels, AdamW against the bandwidth, seconds until a start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import ClassVar, Literal

import torch
from attrs import field, frozen
from torch import Tensor

from benchmarks.kernels import Floor, measure_floor
from benchmarks.regimes import regimes_for
from benchmarks.report import describe_host, markdown_table, writable_folder
from benchmarks.step import alternate
from forge.config import AdamW
from forge.config.checks import integer
from forge.config.flags import parse
from forge.errors import ForgeError, RunError
from forge.training.optimizer import build_optimizer, init_opt_state

ROOT = Path(__file__).parent.parent
WIDTH = 1024
ADAMW_BYTES = 7 * 4
"""A parameter's traffic at least: weight, gradient and two moments read, all but the gradient written, in fp32."""
STREAMS = {"copy": 2 * 4, "add": 3 * 4}
"""Bytes an element of b = a and of b += a, the kernels that the bandwidth is taken from."""
STARTS = {
    "nothing": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "import torch, forge": ("-c", "import torch, forge"),
    "cli.py --help": ("cli.py", "--help"),
}


@frozen
class Options:
    """The step against its kernels, AdamW's step against the memory's bandwidth, the seconds until a command starts."""

    SECTION: ClassVar[str] = ""

    matrices: int = field(default=64, validator=integer(least=1))
    """Matrices of 1024 x 1024 parameters."""
    repeats: int = field(default=11, validator=integer(least=1))
    """Turns of each side."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the optimizer steps."""
    out: str = str(Path(__file__).parent / "results")
    """Folder for <host kind>.floors.md."""


def adamw_sides(mine: list[Tensor], theirs: list[Tensor], grads: list[Tensor]) -> dict[str, Callable[[], None]]:
    """forge's donating step on `mine` and torch's fused AdamW on `theirs`, in place and with moments of their own."""
    config, device = AdamW(), mine[0].device
    ours = {f"blocks.{index}.mlp.w_up.weight": param for index, param in enumerate(mine)}
    given = dict(zip(ours, grads, strict=True))
    optimizer = build_optimizer(config, dict.fromkeys(ours, "hidden"))
    state, update_ = init_opt_state(optimizer, ours), optimizer.update_
    lr, scale, ok = (torch.tensor(value, device=device) for value in (config.lr, 1.0, True))
    assert update_ is not None
    for param, grad in zip(theirs, grads, strict=True):
        param.requires_grad_().grad = grad
    plain = torch.optim.AdamW(
        theirs,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    return {"forge": lambda: update_(given, state, ours, lr, scale, ok), "torch": lambda: _step(plain)}


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def adamw_rates(options: Options) -> dict[str, float]:
    """Bytes a second at the median turn: of each AdamW's least traffic, and of each of `STREAMS`."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda, but torch finds no CUDA device: use --device cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (2, options.matrices, WIDTH, WIDTH)
    params, grads = (torch.randn(shape, generator=generator) * 0.02).to(options.device)
    turns: dict[str, Callable[[], object]] = {**adamw_sides(list(params), list(params.clone()), list(grads))}
    source, target = torch.ones_like(params), torch.ones_like(params)
    turns |= {"copy": lambda: target.copy_(source), "add": lambda: target.add_(source)}
    seconds = alternate(turns, options.repeats, options.device, lambda line: None)
    return {name: STREAMS.get(name, ADAMW_BYTES) * params.numel() / median(taken) for name, taken in seconds.items()}


def start_seconds(repeats: int) -> dict[str, float]:
    """Median seconds of a process that does each of `STARTS`, in turns, after one of each."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTS}
    for turn in range(repeats + 1):
        for name, arguments in STARTS.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: median(taken) for name, taken in seconds.items()}


def regime_floors(options: Options, bandwidth: float) -> dict[str, Floor]:
    """The floor of every regime that AdamW steps in, by name."""
    regimes = [regime for regime in regimes_for(options.device) if regime.optimizer == "adamw"]
    return {
        regime.name: measure_floor(regime, options.device, options.repeats, ADAMW_BYTES, bandwidth)
        for regime in regimes
    }


def to_markdown(
    rates: dict[str, float], starts: dict[str, float], floors: dict[str, Floor], host: dict[str, str]
) -> str:
    """The page."""
    floor = bandwidth_of(rates)
    parts = [[name, *(_ms(part) for part in _parts(found)), *_shares(found)] for name, found in floors.items()]
    steps = [[name, f"{rate / 1e9:.2f}", f"{floor / rate:.2f}x"] for name, rate in rates.items()]
    beyond, helped = starts["import torch, forge"] - starts["import torch"], starts["cli.py --help"]
    shown = [[name, f"{taken:.2f}"] for name, taken in starts.items()]
    met = ["met" if ok else "**not met**" for ok in (floor / rates["forge"] <= 1.1, beyond < 0.3, helped < 0.5)]
    targets = [
        ["AdamW's seconds <= 1.1x those of the bandwidth", f"{floor / rates['forge']:.2f}x", met[0]],
        ["import forge < 0.3 s beyond torch", f"{beyond:.2f} s", met[1]],
        ["--help < 0.5 s", f"{helped:.2f} s", met[2]],
    ]
    head = ["regime", "FLOPs at the GEMM rate", "products", "attention", "AdamW", "their sum", "forge's step",
            "GEMM rate reached by the sum", "by the step"]  # fmt: skip
    return f"""# Floors: a step's kernels, AdamW's bandwidth, and starting

Written by `python -m benchmarks.floors`. {host["device"]}; {host["versions"]}; load {host["load"]}.

AdamW reads a weight, its gradient and two moments and writes all but the gradient, {ADAMW_BYTES} bytes a parameter in
fp32. The bandwidth is the better of a copy's (b = a) and of an addition's in place (b += a, which needs no line that it
did not read). Seconds are those of the median turn, over what AdamW's traffic takes at that bandwidth; use enough
matrices that no cache holds them.

{markdown_table(["step", "GB/s", "seconds over the floor's"], steps)}

The products and the attention kernels of an eager step are recorded and made again without anything between them,
products into memory that is there already: with AdamW's bytes they are the least that a step of torch's kernels takes.
What the step takes beyond their sum are elementwise operators, memory from the system, and Python. Milliseconds, at the
median of turns taken in one run with a large product, whose rate is the GEMM rate.

{markdown_table(head, parts)}

{markdown_table(["process", "seconds, median"], shown)}

{markdown_table(["target", "measured", "verdict"], targets)}
"""


def bandwidth_of(rates: dict[str, float]) -> float:
    """Bytes a second of the better of `STREAMS`."""
    return max(rates[name] for name in STREAMS)


def _parts(found: Floor) -> tuple[float, ...]:
    return found.flops, found.products, found.attention, found.optimizer, found.kernels, found.step


def _shares(found: Floor) -> tuple[str, str]:
    return f"{found.flops / found.kernels:.0%}", f"{found.flops / found.step:.0%}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def main(argv: Sequence[str]) -> int:
    """Run as the flags say; the exit status is 0, or 2 for a mistake of the user's."""
    try:
        options = parse(Options, argv, prog="python -m benchmarks.floors")
        out, host = writable_folder(options.out), describe_host(options.device)
        rates = adamw_rates(options)
        floors = regime_floors(options, bandwidth_of(rates))
        page = to_markdown(rates, start_seconds(options.repeats), floors, host)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(page)
    (out / f"{host['kind']}.floors.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
