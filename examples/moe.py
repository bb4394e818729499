"""A mixture of experts, and what its routers do: DeepSeek-V3's bias evens the load without a loss of its own."""

import argparse
from pathlib import Path

import torch

from forge.config import AdamW, JobConfig, ModelConfig, MoEConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import build_loss_fn, build_optimizer, build_scheduler, build_train_step, build_value_and_grad
from forge.training.capture import capture
from forge.training.extras import init_extras
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

moe = MoEConfig(n_experts=8, top_k=2, n_shared_experts=1, expert_hidden_dim=64, router="sigmoid", bias_update_rate=0.02)
config = JobConfig(
    model=ModelConfig(dim=64, n_layers=2, vocab_size=257, max_seq_len=64, moe=moe),
    train=TrainConfig(steps=40, seq_len=64),
    optimizer=AdamW(lr=3e-3),
)
model = build_model(config.model)
params = init_params(model, config.model, seed=0)
optimizer = build_optimizer(config.optimizer, parameter_roles(model))
train_step = build_train_step(
    config,
    value_and_grad=build_value_and_grad(model, build_loss_fn(config.train, config.model), vocab_size=257),
    optimizer=optimizer,
    schedule=build_scheduler(config.scheduler, config.train.steps),
    donate=True,
)
text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
state = init_state(params, optimizer.init(params), init_extras(config.model))
for step in range(config.train.steps):
    starts = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + 65] for start in starts]).unsqueeze(0)
    state, result = train_step(state, Batch(rows[..., :-1], rows[..., 1:]))
    if int(state.step) % 10 == 0:
        print(
            f"step {int(state.step)}: loss {float(result.loss):.3f}, load of the busiest expert over the mean"
            f" {float(result.moe_balance):.2f}, entropy {float(result.moe_entropy):.2f} nats"
        )
with torch.no_grad():
    chosen = capture(model, state.params, rows[0, :, :-1], ["blocks.*.mlp.router"], extras=state.extras)
for name, experts in chosen.items():
    print(f"{name} sends tokens to its experts: {experts.flatten().bincount(minlength=moe.n_experts).tolist()}")
