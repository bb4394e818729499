"""A training loop of one's own, without `run_training`: batches, accumulation, evaluation, a checkpoint, going on."""

import argparse
import tempfile
from pathlib import Path

import torch

from forge.checkpoint import latest_sound, load_checkpoint, save_checkpoint
from forge.config import AdamW, JobConfig, ModelConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import (
    build_loss_fn,
    build_optimizer,
    build_scheduler,
    build_train_step,
    build_value_and_grad,
    run_eval,
)
from forge.training.eval import build_eval_step
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
train_text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batch_at(step, source=train_text):
    """4 micro-batches of 4 sequences: a function of the step, so that a loop can begin anywhere."""
    starts = torch.randint(len(source) - 65, (16,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([source[start : start + 65] for start in starts]).view(4, 4, 65)
    return Batch(rows[..., :-1], rows[..., 1:])


config = JobConfig(
    model=ModelConfig(dim=64, n_layers=2, vocab_size=257, max_seq_len=64),
    train=TrainConfig(steps=40, seq_len=64),
    optimizer=AdamW(lr=3e-3),
)
model, loss_fn = build_model(config.model), build_loss_fn(config.train, config.model)
optimizer = build_optimizer(config.optimizer, parameter_roles(model))
train_step = build_train_step(
    config,
    value_and_grad=build_value_and_grad(model, loss_fn, vocab_size=257),
    optimizer=optimizer,
    schedule=build_scheduler(config.scheduler, config.train.steps),
    donate=True,  # a step takes the storage of the state that it is given
)
eval_step = build_eval_step(model, loss_fn, vocab_size=257)


def train(state, until):
    while int(state.step) < until:
        state, result = train_step(state, batch_at(int(state.step)))
    held = run_eval(eval_step, state.params, state.extras, [batch_at(step, held_out) for step in range(4)])
    print(f"step {int(state.step)}: loss {float(result.loss):.3f}, held out {held['eval/loss']:.3f}")
    return state


params = init_params(model, config.model, seed=0)
with tempfile.TemporaryDirectory() as folder:
    state = train(init_state(params, optimizer.init(params)), until=20)
    save_checkpoint(Path(folder), state, config=config)
    whole = train(state, until=40)
    fresh = init_state(params, optimizer.init(params))
    resumed = train(load_checkpoint(latest_sound(Path(folder)), fresh), until=40)
print("the same bits:", all(whole.params[name].equal(p) for name, p in resumed.params.items()))
