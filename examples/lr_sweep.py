"""Many learning rates in one loop: a state is a pytree, so states can be stacked and the step mapped over them."""

import argparse
from pathlib import Path

import torch

from forge.config import JobConfig, ModelConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.pytree import tree_stack
from forge.training import build_loss_fn, build_optimizer, build_train_step, build_value_and_grad
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

config = JobConfig(model=ModelConfig(dim=32, n_layers=2, n_heads=2, vocab_size=257, attention_backend="math"))
model = build_model(config.model)
params = init_params(model, config.model, seed=0)
optimizer = build_optimizer(config.optimizer, parameter_roles(model))
loss_fn = build_loss_fn(config.train, config.model)
seam = build_value_and_grad(model, loss_fn, vocab_size=257, transform="func")


def step_at(lr, state, batch):
    step = build_train_step(
        config, value_and_grad=seam, optimizer=optimizer, schedule=lambda n: lr / config.optimizer.lr
    )
    return step(state, batch)


def plot(lrs, losses, file):
    from matplotlib.figure import Figure

    axes = Figure(figsize=(5, 3.5), layout="constrained").subplots()
    axes.semilogx(lrs, losses, marker="o")
    axes.set(xlabel="learning rate", ylabel="loss")
    file.parent.mkdir(exist_ok=True)
    axes.figure.savefig(file)


text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
lrs = torch.logspace(-4, -1, 7)
states = tree_stack([init_state(params, optimizer.init(params))] * len(lrs))
for step in range(25):
    starts = torch.randint(len(text) - 33, (8,), generator=torch.Generator().manual_seed(step))
    tokens = torch.stack([text[start : start + 33] for start in starts]).unsqueeze(0)
    batch = Batch(tokens[..., :-1], tokens[..., 1:])
    states, results = torch.func.vmap(step_at, in_dims=(0, 0, None))(lrs, states, batch)
for lr, loss in zip(lrs.tolist(), results.loss.tolist(), strict=True):
    print(f"lr {lr:.0e}: loss {loss:.3f}")
plot(lrs, results.loss, Path("runs/lr_sweep.png"))
print(f"best: {float(lrs[results.loss.argmin()]):.0e}; see runs/lr_sweep.png")
