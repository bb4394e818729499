"""An optimizer of one's own is two pure functions over dicts by parameter name; here the sign of a momentum.

The step clips before it and skips it where a gradient is not finite, so neither function has to. Parameters without a
gradient are frozen, and come back as they are.
"""

import torch

from forge.config import AdamW, JobConfig, ModelConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import build_loss_fn, build_scheduler, build_train_step, build_value_and_grad
from forge.training.optimizer import Optimizer
from forge.training.state import init_state


def init(params):
    return {"momentum": {name: torch.zeros_like(p) for name, p in params.items()}}


def update(grads, opt_state, params, lr):
    momentum = {name: 0.9 * opt_state["momentum"][name] + grad for name, grad in grads.items()}
    moved = {name: params[name] - lr * momentum[name].sign() for name in grads}
    return {**params, **moved}, {"momentum": {**opt_state["momentum"], **momentum}}


config = JobConfig(
    model=ModelConfig(dim=32, n_layers=2, n_heads=2, vocab_size=257),
    train=TrainConfig(steps=40),
    optimizer=AdamW(lr=3e-3),  # whose learning rate alone is used
)
model = build_model(config.model)
params, signed_momentum = init_params(model, config.model, seed=0), Optimizer(init, update)
train_step = build_train_step(
    config,
    value_and_grad=build_value_and_grad(model, build_loss_fn(config.train, config.model), vocab_size=257),
    optimizer=signed_momentum,
    schedule=build_scheduler(config.scheduler, config.train.steps),
)
text = torch.tensor(list(b"an optimizer is a pair of functions; ")).repeat(4)
batch = Batch(text[None, None, :-1], text[None, None, 1:])
state = init_state(params, init(params))
for _ in range(40):
    state, result = train_step(state, batch)
    if int(state.step) % 10 == 0:
        print(f"step {int(state.step)}: loss {float(result.loss):.3f}")
