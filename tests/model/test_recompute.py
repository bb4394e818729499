"""Recomputing blocks saves memory and changes neither a bit nor a name; blocks of one shape compile once."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial, partialmethod

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from forge.config import ModelConfig, MoEConfig
from forge.model import build_model, init_params, recompute
from forge.model.recompute import apply_activation_checkpointing, compile_blocks, compile_whole

CONFIG = ModelConfig(dim=16, n_layers=4, n_heads=2, n_kv_heads=1, vocab_size=19, max_seq_len=32, ffn_hidden_dim=48)
MODELS = {
    "llama": CONFIG,
    "gpt2": evolve(CONFIG, norm="layernorm", bias=True, mlp="gelu", position="learned"),
    "experts": evolve(CONFIG, moe=MoEConfig(n_experts=4, n_shared_experts=1, expert_hidden_dim=8)),
    "scores in full": evolve(CONFIG, attention_backend="math"),
}
IDS = torch.randint(0, 19, (2, 32), generator=torch.Generator().manual_seed(0))


class _Alive(TorchDispatchMode):
    """Bytes that operations made and something still holds."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch_pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.made[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        return out

    def count(self):
        return sum(storage().nbytes() for storage in self.made.values() if storage() is not None)


class _Run(torch.nn.Module):
    """Recomputation happens in the backward pass, where the substituted parameters must still be in place."""

    def __init__(self, model, counting):
        super().__init__()
        self.model, self.counting = model, counting

    def forward(self, ids):
        alive = _Alive()
        with alive if self.counting else nullcontext():  # under a mode the compiler compiles nothing
            loss = self.model(ids).square().mean()
        kept = alive.count()
        return loss, torch.autograd.grad(loss, list(self.parameters())), kept


def _loss_and_gradient(config, mode, compiled=None):
    model = build_model(config)
    if mode != "none":
        apply_activation_checkpointing(model, mode)
    if compiled is not None:
        compiled(model, experts=False)
    params = {f"model.{name}": p.requires_grad_() for name, p in init_params(model, config, 0).items()}
    return functional_call(_Run(model, counting=not compiled), params, (IDS,))


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_gives_the_same_gradient_bit_for_bit_and_keeps_less(name, mode):
    loss, gradient, kept = _loss_and_gradient(MODELS[name], "none")
    same_loss, same_gradient, less = _loss_and_gradient(MODELS[name], mode)
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradient, same_gradient, strict=True))
    assert less < kept * (0.5 if mode == "full" else 0.75)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_blocks_are_recomputed_to_the_same_gradient(name, mode, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, gradient, _ = _loss_and_gradient(MODELS[name], "none")
    same_loss, same_gradient, _ = _loss_and_gradient(MODELS[name], mode, compiled=compile_blocks)
    assert torch._dynamo.utils.counters["frames"] == {"total": 1, "ok": 1}  # all blocks by one piece of code
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(same_gradient, gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiled_as_one_has_the_same_gradient(name, mode, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    loss, gradient, _ = _loss_and_gradient(MODELS[name], "none")
    same_loss, same_gradient, _ = _loss_and_gradient(MODELS[name], mode, compiled=compile_whole)
    if name != "experts":  # around whose products in fp32 it is cut
        assert torch._dynamo.utils.counters["frames"] == {"total": 1, "ok": 1}
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(same_gradient, gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_blocks_with_experts_are_compiled_around_their_products_in_fp32(mode, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    loss, gradient, _ = _loss_and_gradient(MODELS["experts"], "none")
    same_loss, same_gradient, _ = _loss_and_gradient(MODELS["experts"], mode, compiled=compile_blocks)
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(same_gradient, gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("compiled", [compile_blocks, compile_whole])
def test_cuda_graphs_are_asked_of_the_compiler(compiled):
    counters = torch._dynamo.utils.counters
    for wanted in (False, True):
        counters.clear()
        model = build_model(CONFIG)
        compiled(model, cuda_graphs=wanted)
        with torch.no_grad():
            functional_call(model, init_params(model, CONFIG, 0), (IDS,))
        assert (counters["inductor"]["cudagraph_skips"] > 0) == wanted  # for want of CUDA here


def test_selective_recomputation_keeps_attention_and_every_second_product():
    kept = {mode: _loss_and_gradient(CONFIG, mode)[2] for mode in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]
    # Of the products wq wk wv wo w_gate w_up w_down the 1st, 3rd, 5th and 7th; of attention the output and one
    # logarithm a head; for each of 2 x 32 tokens, in fp32.
    floats = 16 + 8 + 48 + 16 + (16 + 2)
    assert kept["selective"] - kept["full"] == 4 * CONFIG.n_layers * 64 * floats


@pytest.mark.parametrize("compiled", [compile_blocks, compile_whole])
def test_names_stay_as_they_are(compiled):
    model = build_model(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    apply_activation_checkpointing(model)
    compiled(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_every_block_is_recomputed_and_no_rng_state_kept(mode, monkeypatch):
    model, asked = build_model(CONFIG), []
    before = [block.forward for block in model.blocks.children()]
    apply_activation_checkpointing(model, mode)
    assert all(block.forward != old for block, old in zip(model.blocks.children(), before, strict=True))
    monkeypatch.setattr(recompute, "checkpoint", lambda forward, *args, **options: asked.append((forward, options)))
    for block in model.blocks.children():
        block.forward("x", None, None)
    assert [forward for forward, _ in asked] == before
    assert all(options["preserve_rng_state"] is False for _, options in asked)
