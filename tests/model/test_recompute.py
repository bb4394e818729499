"""Recomputing blocks saves memory and changes neither a bit nor a name; blocks of one shape compile once."""

from __future__ import annotations

import torch
from torch.func import functional_call

from forge.config import ModelConfig
from forge.model import build_model, init_params
from forge.model.recompute import apply_activation_checkpointing, compile_blocks

CONFIG = ModelConfig(dim=16, n_layers=4, n_heads=2, vocab_size=19, max_seq_len=32)
IDS = torch.randint(0, 19, (2, 32), generator=torch.Generator().manual_seed(0))


def _loss_and_gradient(model):
    params = {name: p.requires_grad_() for name, p in init_params(model, CONFIG, 0).items()}
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    class Run(torch.nn.Module):
        """Recomputation happens in the backward pass, where the substituted parameters must still be in place."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = self.model(ids).square().mean()
            return loss, torch.autograd.grad(loss, list(params.values()))

    loss, gradient = functional_call(Run(), {f"model.{name}": p for name, p in params.items()}, (IDS,))
    return loss, gradient, sum(kept.values())


def test_recomputation_gives_the_same_gradient_bit_for_bit_and_keeps_less():
    plain, recomputed = build_model(CONFIG), build_model(CONFIG)
    apply_activation_checkpointing(recomputed)
    loss, gradient, kept = _loss_and_gradient(plain)
    same_loss, same_gradient, less = _loss_and_gradient(recomputed)
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradient, same_gradient, strict=True))
    assert less < kept / 2


def test_names_stay_as_they_are():
    model = build_model(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model)
    compile_blocks(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


def test_every_block_is_recomputed():
    model = build_model(CONFIG)
    before = [block.forward for block in model.blocks.children()]
    apply_activation_checkpointing(model)
    assert all(block.forward != old for block, old in zip(model.blocks.children(), before, strict=True))
    assert all(block.forward.keywords["preserve_rng_state"] is False for block in model.blocks.children())
