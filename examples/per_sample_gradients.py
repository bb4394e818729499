"""The gradient of each sample by itself, in one mapped call, and what it says: the gradient noise scale."""

import argparse
from pathlib import Path

import torch

from forge.config import ModelConfig, TrainConfig
from forge.data import Batch
from forge.model import build_model, init_params
from forge.training import build_loss_fn, build_value_and_grad

config = ModelConfig(dim=32, n_layers=2, n_heads=2, vocab_size=257, attention_backend="math")  # the one vmap can map
model = build_model(config)
params = init_params(model, config, seed=0)
seam = build_value_and_grad(model, build_loss_fn(TrainConfig(), config), vocab_size=257, transform="func")


def gradient_of(ids, labels):  # int64 (S,) each
    _, grads = seam(params, {}, Batch(ids[None, None], labels[None, None]))
    return grads


text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
tokens = text[: 64 * 33].view(64, 33)
grads = torch.func.vmap(gradient_of)(tokens[:, :-1], tokens[:, 1:])  # by name, each (64, *shape of the parameter)
norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)  # (64,)
for sample in norms.topk(3).indices.tolist():
    print(f"gradient norm {float(norms[sample]):.3f}: {bytes(tokens[sample].tolist())!r}")

# McCandlish et al. 2018, appendix A.1, from batches of 1 and of n samples. One sample's gradient is the true one plus
# noise of total variance S; the mean of n has noise S / n. Batches far beyond S / |G|^2 no longer make steps better.
n = len(norms)
small = norms.square().mean()  # |G|^2 + S
big = sum(grad.mean(dim=0).square().sum() for grad in grads.values())  # |G|^2 + S / n
signal, noise = (n * big - small) / (n - 1), (small - big) / (1 - 1 / n)
print(f"|G|^2 {float(signal):.3f}, noise {float(noise):.3f}: noise scale {float(noise / signal):.2f} sequences")
