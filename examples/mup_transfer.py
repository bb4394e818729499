"""muP (Yang et al. 2022): the best learning rate of a narrow model is that of a wide one; `--help` lists the sizes.

Above in the picture the loss against the learning rate, below the coordinate check: how much activations change.
"""

import argparse
import functools
from pathlib import Path

import torch

from forge.config import AdamW, JobConfig, ModelConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import build_loss_fn, build_optimizer, build_scheduler, build_train_step, build_value_and_grad
from forge.training.capture import capture
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

SITES = ["blocks.1.attn", "blocks.1.mlp", "blocks.1", "head"]
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch_at(step):
    starts = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + 65] for start in starts]).unsqueeze(0)
    return Batch(rows[..., :-1], rows[..., 1:])


def trained(width, base, lr, steps):
    """(model, parameters before, after, loss over the last quarter); without a base the parametrisation is standard."""
    model_config = ModelConfig(
        dim=width, n_layers=2, head_dim=16, ffn_hidden_dim=3 * width, vocab_size=257, init_std=0.1, mup_base_dim=base
    )
    config = JobConfig(model=model_config, train=TrainConfig(steps=steps, seq_len=64), optimizer=AdamW(lr=lr))
    model = build_model(model_config)
    params = init_params(model, model_config, seed=0)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model), width=model_config.width_multiplier)
    seam = build_value_and_grad(model, build_loss_fn(config.train, model_config), vocab_size=257)
    schedule = build_scheduler(config.scheduler, steps)
    train_step = build_train_step(config, value_and_grad=seam, optimizer=optimizer, schedule=schedule)
    state, losses = init_state(params, optimizer.init(params)), []
    for step in range(steps):
        state, result = train_step(state, batch_at(step))
        losses.append(float(result.loss))
    last = losses[-max(1, steps // 4) :]
    return model, params, state.params, sum(last) / len(last)


@functools.cache
def loss_of(width, base, lr, steps):
    return trained(width, base, lr, steps)[-1]


@torch.no_grad()
def changes(width, base, lr):
    """Site -> mean absolute change of its activations over four updates."""
    model, before, after, _ = trained(width, base, lr, steps=4)
    old, new = (capture(model, params, batch_at(0).input_ids[0], SITES) for params in (before, after))
    return {site: float((new[site] - old[site]).abs().mean()) for site in old}


def plot(lrs, widths, losses, moved, file):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 6), layout="constrained").subplots(2, 2, sharey="row")
    for above, below, name in zip(*axes, losses, strict=True):
        for width in widths:
            (line,) = above.semilogx(lrs, losses[name][width], marker=".", base=2, label=f"width {width}")
            best = min(zip(losses[name][width], lrs, strict=True))
            above.plot(best[1], best[0], "o", color=line.get_color(), markersize=9)
        for site in SITES:
            below.loglog(widths, [moved[name][width][site] for width in widths], marker=".", base=2, label=site)
        above.set(title=name, xlabel="learning rate", ylabel="loss")
        below.set(xlabel="width", ylabel="mean |change|, 4 updates")
    axes[0, 1].legend()
    axes[1, 1].legend()
    file.parent.mkdir(exist_ok=True)
    axes[0, 0].figure.savefig(file, dpi=90)


def main():
    numbers = argparse.ArgumentParser(description=__doc__)
    numbers.add_argument("--widths", type=int, nargs="+", default=[32, 128, 256], help="the first is the base")
    numbers.add_argument("--exponents", type=int, nargs="+", default=list(range(-10, -3)), help="of the rates, base 2")
    numbers.add_argument("--steps", type=int, default=30, help="updates of a run")
    asked = numbers.parse_args()
    widths, lrs = asked.widths, [2.0**exponent for exponent in asked.exponents]
    bases, losses = {"standard": None, "muP": widths[0]}, {"standard": {}, "muP": {}}
    for name, base in bases.items():
        for width in widths:
            differs = base if width != widths[0] else None  # at the base the two are the same
            losses[name][width] = [loss_of(width, differs, lr, asked.steps) for lr in lrs]
            loss, exponent = min(zip(losses[name][width], asked.exponents, strict=True))
            print(f"{name:8s} width {width:4d}: best rate 2^{exponent}, loss {loss:.3f}", flush=True)
    moved = {name: {width: changes(width, base, 2**-7) for width in widths} for name, base in bases.items()}
    for name in bases:
        growth = moved[name][widths[-1]]["head"] / moved[name][widths[0]]["head"]
        print(f"{name:8s} logits of the widest move {growth:.2f} times as much as those of the narrowest")
    plot(lrs, widths, losses, moved, Path("runs/mup_transfer.png"))
    print("see runs/mup_transfer.png")


if __name__ == "__main__":
    main()
