"""Capture is a function: it gives what the model computes, and leaves the model as it was."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.func import functional_call

from forge.config import ModelConfig, MoEConfig
from forge.errors import ConfigError, RunError
from forge.model import build_model, init_params
from forge.training.capture import capture, capture_sites, stream_to_safetensors
from forge.training.extras import init_extras

SMALL = ModelConfig(dim=16, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=19, max_seq_len=32)
VARIANTS = {
    "llama": SMALL,
    "gpt2": evolve(SMALL, n_kv_heads=4, norm="layernorm", mlp="gelu", position="learned", tied_embeddings=True),
    "window": evolve(SMALL, sliding_window=3, qk_norm=True, logit_softcap=5.0),
    "experts": evolve(SMALL, moe=MoEConfig(n_experts=4, router="sigmoid", frequency=3, n_shared_experts=1)),
}


def _setup(config: ModelConfig = SMALL, length: int = 12):
    model = build_model(config)
    ids = torch.randint(0, 19, (2, length), generator=torch.Generator().manual_seed(0))
    return model, init_params(model, config, 0), ids


def _hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_site_of_every_model_is_captured_and_the_head_is_the_logits(config):
    model, params, ids = _setup(config)
    found = capture(model, params, ids, capture_sites(model), extras=init_extras(config))
    assert list(found) == capture_sites(model)
    torch.testing.assert_close(found["head"], functional_call(model, params, (ids,)))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_parts_of_a_block_add_up_to_the_residual_stream(config):
    model, params, ids = _setup(config)
    found = capture(model, params, ids, ["blocks.*", "blocks.1.attn", "blocks.1.mlp"])
    torch.testing.assert_close(found["blocks.0"] + found["blocks.1.attn"] + found["blocks.1.mlp"], found["blocks.1"])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_weights_mix_the_values_to_what_attention_returned(config, packed):
    model, params, ids = _setup(config)
    doc_ids = (torch.arange(12) // 5).expand(2, -1) if packed else None
    found = capture(model, params, ids, ["blocks.*.attn*", "blocks.*.attn.*"], doc_ids=doc_ids)
    for layer in range(config.n_layers):
        weights, v = found[f"blocks.{layer}.attn.weights"], found[f"blocks.{layer}.attn.wv"]
        assert weights.shape == (2, 4, 12, 12)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 12))
        v = v.unflatten(-1, (config.kv_heads, -1)).transpose(1, 2).repeat_interleave(4 // config.kv_heads, dim=1)
        mixed = (weights @ v).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(mixed @ params[f"blocks.{layer}.attn.wo.weight"].T, found[f"blocks.{layer}.attn"])


@given(st.sets(st.sampled_from(capture_sites(build_model(SMALL))), min_size=1))
@settings(deadline=None, max_examples=20)
def test_any_choice_of_sites_gives_these_alone_and_leaves_the_model_as_it_was(sites):
    model, params, ids = _setup()
    everything = capture(model, params, ids, capture_sites(model))
    found = capture(model, params, ids, sorted(sites))
    assert set(found) == sites
    assert all(value.equal(everything[name]) for name, value in found.items())
    assert _hooks(model) == 0 and all(p.is_meta for p in model.parameters())


def test_no_hook_is_left_where_the_forward_pass_raises():
    model, params, _ = _setup()
    beyond = torch.full((1, 4), 19)
    with pytest.raises(IndexError):
        capture(model, params, beyond, ["embed", "blocks.*", "blocks.*.attn.weights"])
    assert _hooks(model) == 0
    again = capture(model, params, beyond - 1, ["blocks.0"])
    assert list(again) == ["blocks.0"]


def test_gradients_flow_from_what_is_captured():
    model, params, ids = _setup()

    def sharpness(params):
        return capture(model, params, ids, ["blocks.1.attn.weights"])["blocks.1.attn.weights"].square().sum()

    grads = torch.func.grad(sharpness)(params)
    assert float(grads["blocks.1.attn.wq.weight"].abs().sum()) > 0
    assert float(grads["blocks.1.attn.wv.weight"].abs().sum()) == 0  # the weights depend on no value of their layer
    assert float(grads["blocks.0.attn.wv.weight"].abs().sum()) > 0


def test_a_star_stands_for_one_part():
    model, params, ids = _setup()
    assert list(capture(model, params, ids, ["blocks.*.mlp"])) == [f"blocks.{layer}.mlp" for layer in range(3)]
    assert list(capture(model, params, ids, ["blocks.*"])) == [f"blocks.{layer}" for layer in range(3)]


def test_an_unknown_site_is_one_line_with_the_nearest_name():
    model, params, ids = _setup()
    with pytest.raises(ConfigError, match=r"no site 'blocks\.1\.atn' to capture \(did you mean 'blocks\.1\.attn'\?\)$"):
        capture(model, params, ids, ["blocks.1.atn"])


def test_compiled_blocks_are_refused():
    model, params, ids = _setup()
    model.blocks["0"].compile()
    with pytest.raises(ConfigError, match="compiled blocks"):
        capture(model, params, ids, ["norm"])


def test_a_stream_is_written_file_by_file_with_one_capture_in_memory(tmp_path):
    model, params, _ = _setup()
    batches = torch.randint(0, 19, (4, 2, 6), generator=torch.Generator().manual_seed(1))
    sites, before = ["blocks.*", "blocks.1.attn.weights"], []

    def captured():
        for ids in batches:
            assert all(alive() is None for alive in before), "an earlier capture is still held"
            found = capture(model, params, ids, sites)
            before.extend(weakref.ref(value) for value in found.values())
            yield found
            del found

    assert stream_to_safetensors(tmp_path / "out", captured()) == 4
    index = [json.loads(line) for line in (tmp_path / "out" / "index.jsonl").read_text().splitlines()]
    assert index[3]["sites"]["blocks.1.attn.weights"] == {"shape": [2, 4, 6, 6], "dtype": "float32"}
    for ids, line in zip(batches, index, strict=True):
        expected, stored = capture(model, params, ids, sites), load_file(tmp_path / "out" / line["file"])
        assert set(stored) == set(expected) and all(stored[name].equal(expected[name]) for name in stored)
    assert len(list((tmp_path / "out").iterdir())) == 5


def test_what_is_interrupted_leaves_whole_files_and_captures_are_not_written_over(tmp_path):
    def captured():
        yield {"a": torch.ones(2)}
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        stream_to_safetensors(tmp_path, captured())
    assert load_file(tmp_path / "00000.safetensors")["a"].tolist() == [1, 1]
    with pytest.raises(RunError, match="has captures already"):
        stream_to_safetensors(tmp_path, captured())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"captures cannot be written \("):
        stream_to_safetensors(tmp_path / "file" / "out", [{"a": torch.ones(2)}])
