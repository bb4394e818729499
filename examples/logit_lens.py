"""The logit lens (nostalgebraist 2020): what the model would say if it stopped after each block."""

import argparse
from pathlib import Path

import torch
from torch.func import functional_call

from forge.config import AdamW, JobConfig, ModelConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.model.head import head_logits
from forge.training import build_loss_fn, build_optimizer, build_scheduler, build_train_step, build_value_and_grad
from forge.training.capture import capture
from forge.training.optimizer import parameter_roles
from forge.training.state import init_state

text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def trained(config):
    model = build_model(config.model)
    params = init_params(model, config.model, seed=0)
    optimizer = build_optimizer(config.optimizer, parameter_roles(model))
    seam = build_value_and_grad(model, build_loss_fn(config.train, config.model), vocab_size=257)
    schedule = build_scheduler(config.scheduler, config.train.steps)
    train_step = build_train_step(config, value_and_grad=seam, optimizer=optimizer, schedule=schedule, donate=True)
    state = init_state(params, optimizer.init(params))
    for step in range(config.train.steps):
        starts = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([text[start : start + 65] for start in starts]).unsqueeze(0)
        state, _ = train_step(state, Batch(rows[..., :-1], rows[..., 1:]))
    return model, state.params


@torch.no_grad()
def logit_lens(model, params, ids):
    """Logits (B, S, V) after each block, by the last norm and the head, which were trained for the last block alone."""
    residual = capture(model, params, ids, ["blocks.*"])
    norm = {name.removeprefix("norm."): p for name, p in params.items() if name.startswith("norm.")}
    head = params["embed.weight" if model.head is None else "head.weight"]
    return {
        name: head_logits(functional_call(model.norm, norm, (x,)), head, model.config.logit_softcap)
        for name, x in residual.items()
    }


if __name__ == "__main__":
    model_config = ModelConfig(dim=64, n_layers=4, vocab_size=257, max_seq_len=64)
    train_config = TrainConfig(steps=60, seq_len=64)
    model, params = trained(JobConfig(model=model_config, train=train_config, optimizer=AdamW(lr=8e-3)))
    prompt = b"        if self.format"
    layers = logit_lens(model, params, torch.tensor([list(prompt)]))
    print("after".ljust(11) + "".join(repr(chr(byte)).rjust(8) for byte in prompt[-10:]))
    for name, logits in layers.items():
        print(name.ljust(11) + "".join(repr(chr(byte)).rjust(8) for byte in logits[0, -10:].argmax(-1).tolist()))
