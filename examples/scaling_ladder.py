"""Five sizes on the same tokens, a power law through their losses, and what it says of the next size."""

import argparse
from pathlib import Path

import numpy as np
import torch

from forge.config import JobConfig, ModelConfig, Muon, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import build_loss_fn, build_optimizer, build_scheduler, build_train_step, build_value_and_grad
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def loss_of(dim, steps=60):
    """(parameters, loss over the last ten steps)."""
    model_config = ModelConfig(dim=dim, n_layers=2, head_dim=4, vocab_size=257, max_seq_len=64)
    config = JobConfig(
        model=model_config, train=TrainConfig(steps=steps, seq_len=64), optimizer=Muon(lr=0.02, adam_lr=0.01)
    )
    model = build_model(config.model)
    params = init_params(model, config.model, seed=0)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    seam = build_value_and_grad(model, build_loss_fn(config.train, config.model), vocab_size=257)
    schedule = build_scheduler(config.scheduler, steps)
    train_step = build_train_step(config, value_and_grad=seam, optimizer=optimizer, schedule=schedule, donate=True)
    state, losses = init_state(params, optimizer.init(params)), []
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + 65] for start in starts]).unsqueeze(0)
        state, result = train_step(state, Batch(rows[..., :-1], rows[..., 1:]))
        losses.append(float(result.loss))
    return sum(p.numel() for p in params.values()), sum(losses[-10:]) / 10


def plot(sizes, losses, fitted, file):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5, 3.5), layout="constrained").subplots()
    axes.loglog(sizes, losses, "o")
    axes.loglog(sizes, fitted)
    axes.set(xlabel="parameters", ylabel="loss")
    file.parent.mkdir(exist_ok=True)
    axes.figure.savefig(file)


ladder = [loss_of(dim) for dim in (4, 8, 16, 32, 64)]
for size, loss in ladder:
    print(f"{size:7d} parameters: loss {loss:.3f}")
sizes, losses = map(np.array, zip(*ladder, strict=True))
slope, intercept = np.polyfit(np.log(sizes), np.log(losses), 1)


def law(size):
    return np.exp(intercept) * size**slope


plot(sizes, losses, law(sizes), Path("runs/scaling_ladder.png"))
print(f"loss = {np.exp(intercept):.2f} N^{slope:.3f}; at twice the largest size {law(2 * sizes[-1]):.3f}")
