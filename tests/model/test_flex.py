"""flex_attention by blocks equals scaled_dot_product_attention under the whole mask, on the CPU without compiling."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch.nn.attention import flex_attention

from forge.config import JobConfig, ModelConfig, TrainConfig
from forge.errors import ConfigError
from forge.model import attention
from forge.model.attention import Attention, attention_mask
from forge.model.flex import block_mask

TOKENS = 150  # more than a block of 128, and no multiple of it
MODEL = ModelConfig(dim=32, n_heads=4, n_kv_heads=2, head_dim=16, max_seq_len=TOKENS, attention_backend="flex")
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 110 + [2] * 20, [7] * TOKENS])
SHAPES = {
    "documents": (MODEL, DOCUMENTS),
    "window": (evolve(MODEL, sliding_window=9), None),
    "documents and window": (evolve(MODEL, sliding_window=40), DOCUMENTS),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Torch refuses a backward pass on the CPU for want of a kernel; its own formula in eager mode has one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


def _inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, 16), (2, 2, TOKENS, 16), (2, 2, TOKENS, 16))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_and_a_whole_mask_agree_in_value_and_gradient(name):
    config, documents = SHAPES[name]
    blocks = block_mask(config, TOKENS, documents, torch.device("cpu"))
    whole = attention_mask(config, torch.arange(TOKENS), 0, documents)
    assert isinstance(whole, torch.Tensor)  # a CPU has no use for blocks
    inputs, mixer = _inputs(), Attention(config)
    found, expected = (mixer._mix(*inputs, mask) for mask in (blocks, whole))
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad(mixed, inputs, weights) for mixed in (found, expected)]
    torch.testing.assert_close(*grads)


def test_hidden_blocks_are_skipped():
    documents = torch.arange(1024).div(256, rounding_mode="floor")[None]  # four of two blocks each
    blocks = block_mask(MODEL, 1024, documents, torch.device("cpu"))
    assert blocks.kv_num_blocks.add(blocks.full_kv_num_blocks).tolist() == [[[1, 2] * 4]]


@pytest.mark.parametrize(
    ("config", "documents", "past", "by_blocks"),
    [
        (MODEL, DOCUMENTS, 0, True),
        (MODEL, None, 0, False),  # plain causal: SDPA's own kernels are faster
        (evolve(MODEL, attention_backend="auto"), DOCUMENTS, 0, False),
        (evolve(MODEL, sliding_window=4), None, 0, True),
        (evolve(MODEL, sliding_window=4), None, 3, False),  # with a cache
    ],
)
def test_blocks_are_for_whole_sequences_on_cuda_of_which_something_is_hidden(
    config, documents, past, by_blocks, monkeypatch
):
    monkeypatch.setattr(attention, "block_mask", lambda *given: "blocks")
    positions = torch.arange(past, past + TOKENS)
    on_cuda = SimpleNamespace(
        shape=positions.shape, device=positions.device, is_cuda=True, unsqueeze=positions.unsqueeze
    )
    assert (attention_mask(config, on_cuda, past, documents) == "blocks") is by_blocks


def test_selective_recomputation_is_refused_with_flex():
    with pytest.raises(ConfigError, match="choose full"):
        JobConfig(model=MODEL, train=TrainConfig(seq_len=TOKENS, activation_checkpointing="selective"))
