"""Attention against the formula written out: heads, shared keys, biases, norms, masks, cache."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from torch.func import functional_call

from forge.config import DataConfig, DistributedConfig, JobConfig, ModelConfig
from forge.errors import ConfigError
from forge.model.attention import Attention, attention_mask, check_attention_backend
from forge.model.rope import apply_rope, rotary_table

CONFIG = ModelConfig(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=6, vocab_size=19, max_seq_len=32)
TOKENS = 7
X = torch.randn(2, TOKENS, 16, generator=torch.Generator().manual_seed(0))
ROTARY = rotary_table(torch.arange(TOKENS), CONFIG)

VARIANTS = {
    "grouped keys": CONFIG,
    "one key head": evolve(CONFIG, n_kv_heads=1),
    "as many keys as queries": evolve(CONFIG, n_kv_heads=None),
    "biases": evolve(CONFIG, bias=True),
    "biases of q, k, v": evolve(CONFIG, qkv_bias=True),
    "norms on heads": evolve(CONFIG, qk_norm=True),
}


def _attention(config):
    attention, generator = Attention(config), torch.Generator().manual_seed(1)
    weights = {n: torch.randn(p.shape, generator=generator) / 3 for n, p in attention.named_parameters()}
    return attention, weights


def _written_out(config, w, x, allowed):
    """One query at a time, one head at a time."""
    heads, shared, width = config.query_heads, config.query_heads // config.kv_heads, config.head_width

    def project(name, count):
        y = (
            (x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(())))
            .unflatten(-1, (count, width))
            .transpose(1, 2)
        )
        norm = w.get(f"{name[1]}_norm.weight")
        if norm is not None:
            y = y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * norm
        return y

    q, k = (apply_rope(project(name, count), ROTARY) for name, count in (("wq", heads), ("wk", config.kv_heads)))
    v = project("wv", config.kv_heads)
    out = torch.zeros(x.shape[0], heads, TOKENS, width)
    for b in range(x.shape[0]):
        for h in range(heads):
            for i in range(TOKENS):
                keys = [j for j in range(TOKENS) if allowed(i, j)]
                scores = torch.stack([q[b, h, i] @ k[b, h // shared, j] / math.sqrt(width) for j in keys]).softmax(0)
                out[b, h, i] = sum(s * v[b, h // shared, j] for s, j in zip(scores, keys, strict=True))
    mixed = out.transpose(1, 2).flatten(-2)
    return mixed @ w["wo.weight"].T + w.get("wo.bias", torch.zeros(()))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_attention_is_its_formula(config):
    attention, w = _attention(config)
    found = functional_call(attention, w, (X, ROTARY, None))
    torch.testing.assert_close(found, _written_out(config, w, X, lambda i, j: j <= i), rtol=1e-4, atol=1e-5)


def test_a_mask_says_which_keys_each_query_sees():
    attention, w = _attention(CONFIG)
    mask = torch.tensor([[(i * 3 + j) % 4 != 0 or i == j for j in range(TOKENS)] for i in range(TOKENS)])
    found = functional_call(attention, w, (X, ROTARY, mask[None, None]))
    expected = _written_out(CONFIG, w, X, lambda i, j: bool(mask[i, j]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_output_bias_is_of_full_biases_only():
    names = {kind: [n for n, _ in Attention(VARIANTS[kind]).named_parameters()] for kind in VARIANTS}
    assert "wo.bias" in names["biases"]
    assert "wo.bias" not in names["biases of q, k, v"] and "wq.bias" in names["biases of q, k, v"]
    assert not any("bias" in name or "norm" in name for name in names["grouped keys"])


def test_what_is_kept_is_attended_to():
    attention, w = _attention(CONFIG)
    mask, kept = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None], []

    def keep(keys, values):
        kept.append((keys, values))
        return tuple(torch.cat(parts, dim=2) for parts in zip(*kept, strict=True))

    whole = functional_call(attention, w, (X, ROTARY, mask))
    functional_call(attention, w, (X[:, :-1], rotary_table(torch.arange(TOKENS - 1), CONFIG), None, keep))
    last = rotary_table(torch.tensor([TOKENS - 1]), CONFIG)
    found = functional_call(attention, w, (X[:, -1:], last, mask[:, :, -1:], keep))
    torch.testing.assert_close(found, whole[:, -1:])


def test_padding_is_seen_by_nobody_but_itself():
    found = attention_mask(CONFIG, torch.arange(4), 0, None, padding=torch.tensor([0, 2]))
    assert found[0, 0].tolist() == torch.ones(4, 4, dtype=torch.bool).tril().tolist()
    assert found[1, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


UNMASKED = JobConfig(data=DataConfig(isolate_documents=False))


@pytest.mark.parametrize(
    "job",
    [
        JobConfig(data=DataConfig(isolate_documents=True)),
        evolve(UNMASKED, model=ModelConfig(sliding_window=8)),
        evolve(UNMASKED, distributed=DistributedConfig(cp=2)),
    ],
)
def test_flash_on_cuda_is_refused_where_a_run_needs_masks_and_there_alone(job):
    flash = evolve(job, model=evolve(job.model, attention_backend="flash"))
    with pytest.raises(ConfigError, match="flash takes no masks"):
        check_attention_backend(flash, torch.device("cuda"))
    check_attention_backend(flash, torch.device("cpu"))
    check_attention_backend(job, torch.device("cuda"))
    plain = evolve(UNMASKED, model=ModelConfig(attention_backend="flash"))
    check_attention_backend(plain, torch.device("cuda"))


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_kernel_of_cuda_is_refused_elsewhere(backend):
    job = JobConfig(model=ModelConfig(attention_backend=backend))
    with pytest.raises(ConfigError, match=f"attention_backend = {backend} needs CUDA, and this is a cpu: choose auto"):
        check_attention_backend(job, torch.device("cpu"))
    check_attention_backend(job, torch.device("cuda"))
