"""FP8 is for the blocks' projections whose sides fit, changes no name, and says why where it cannot run."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from attrs import evolve, frozen
from torch import nn

from forge.config import JobConfig, ModelConfig, MoEConfig, TrainConfig
from forge.data.batch import Batch
from forge.errors import ConfigError, RunError
from forge.model import build_model, init_params
from forge.model.fp8 import apply_fp8, check_fp8, takes_fp8
from forge.model.recompute import apply_activation_checkpointing
from forge.training.grad import build_value_and_grad
from forge.training.loss import build_loss_fn
from forge.training.parts import build_parts
from forge.training.plan import plan_run
from forge.training.runtime import build_runtime

MODEL = ModelConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=32, ffn_hidden_dim=128, init_std=0.1
)
JOB = JobConfig(model=MODEL, train=TrainConfig(seq_len=32, device="cpu", precision="bf16", fp8=True))


class _Swapped(nn.Linear):
    """What the fake torchao puts in."""


@pytest.fixture
def torchao(monkeypatch):
    """A torchao that swaps modules as the real one does, and computes nothing."""

    @frozen
    class Float8LinearConfig:
        emulate: bool

    def convert_to_float8_training(module, *, module_filter_fn, config):
        for name, child in list(module.named_children()):
            convert_to_float8_training(child, module_filter_fn=module_filter_fn, config=config)
            if isinstance(child, nn.Linear) and module_filter_fn(child, name):
                swapped = _Swapped(child.in_features, child.out_features, bias=False, device="meta")
                swapped.weight, swapped.bias = child.weight, child.bias
                setattr(module, name, swapped)

    package, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    float8.Float8LinearConfig, float8.convert_to_float8_training = Float8LinearConfig, convert_to_float8_training
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)


def _swapped(config, ranks=1):
    model = build_model(config)
    names = list(model.state_dict())
    apply_fp8(model, ranks=ranks)
    assert list(model.state_dict()) == names
    return [name for name, module in model.named_modules() if isinstance(module, _Swapped)]


def test_projections_of_blocks_are_taken_and_embedding_and_head_are_not(torchao):
    inner = ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "mlp.w_gate", "mlp.w_up", "mlp.w_down")
    assert _swapped(MODEL) == [f"blocks.{layer}.{name}" for layer in (0, 1) for name in inner]


def test_sides_that_are_no_multiple_of_sixteen_stay(torchao):
    assert {name.split(".")[2] for name in _swapped(evolve(MODEL, ffn_hidden_dim=120))} == {"attn"}
    # Over two ranks a key projection is 16 wide, over four 8.
    assert "blocks.0.attn.wk" in _swapped(MODEL, ranks=2)
    assert "blocks.0.attn.wk" not in _swapped(MODEL, ranks=4) and "blocks.0.attn.wq" in _swapped(MODEL, ranks=4)


def test_shared_experts_are_taken_and_routed_ones_are_not(torchao):
    moe = MoEConfig(n_experts=4, n_shared_experts=1, expert_hidden_dim=32)
    in_mlp = {name for name in _swapped(evolve(MODEL, moe=moe)) if ".0.mlp." in name}
    assert in_mlp == {f"blocks.0.mlp.shared.{name}" for name in ("w_gate", "w_up", "w_down")}


def test_only_linear_layers_take_fp8():
    assert takes_fp8(nn.Linear(16, 32, device="meta")) and not takes_fp8(nn.Linear(16, 24, device="meta"))
    assert not takes_fp8(nn.Embedding(64, 64, device="meta"))


def test_without_torchao_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"train\.fp8 = true needs torchao: pip install torchao"):
        apply_fp8(build_model(MODEL))


def test_a_device_without_fp8_is_refused_in_one_line(monkeypatch):
    with pytest.raises(RunError, match=r"capability 8\.9 or newer, and this is a cpu"):
        build_parts(JOB, build_runtime(JOB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(RunError, match=r"NVIDIA A100-SXM4-80GB has 8\.0: set train\.fp8 = false"):
        check_fp8(torch.device("cuda", 0), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_fp8(torch.device("cuda", 0), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"set train\.precision = bf16"):
        check_fp8(torch.device("cuda", 0), torch.float32)


def test_a_plan_needs_no_such_device():
    plain = evolve(JOB, train=evolve(JOB.train, fp8=False))
    assert plan_run(JOB, tflops=1) == plan_run(plain, tflops=1)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_emulated_fp8_trains_near_bf16_and_recomputes_to_the_same_bits(mode):
    pytest.importorskip("torchao", reason="pip install torchao")
    ids = torch.randint(0, 64, (1, 2, 33), generator=torch.Generator().manual_seed(0))
    batch, params = Batch(ids[..., :-1], ids[..., 1:]), init_params(build_model(MODEL), MODEL, 0)

    def loss_and_gradient(fp8, mode="none"):
        model = build_model(MODEL)
        if fp8:
            apply_fp8(model, emulate=True)
        if mode != "none":
            apply_activation_checkpointing(model, mode)
        loss_fn = build_loss_fn(JOB.train, MODEL)
        seam = build_value_and_grad(model, loss_fn, vocab_size=64, compute_dtype=torch.bfloat16)
        sums, grads = seam(params, {}, batch)
        return sums.total, grads

    loss, grads = loss_and_gradient(fp8=False)
    rounded_loss, rounded = loss_and_gradient(fp8=True, mode=mode)
    torch.testing.assert_close(rounded_loss, loss, rtol=1e-2, atol=0)
    for name, grad in grads.items():
        assert 1e-3 < (rounded[name] - grad).norm() / grad.norm() < 0.3, name
    again = loss_and_gradient(fp8=True)
    assert torch.equal(again[0], rounded_loss)
    assert all(torch.equal(again[1][name], grad) for name, grad in rounded.items())
