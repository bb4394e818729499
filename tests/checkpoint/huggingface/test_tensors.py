"""The table of names is a bijection: every parameter has its tensors, every tensor its parameter, and no bit changes."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from forge.checkpoint.huggingface.families import family_of
from forge.checkpoint.huggingface.tensors import is_buffer, origins, to_family, to_forge, units
from forge.model import build_model
from tests.checkpoint.huggingface.shapes import model, models


def _numbered(config):
    """Parameters whose elements are all different, so that a misplaced one shows."""
    params, first = {}, 0
    for name, p in build_model(config).named_parameters():
        params[name] = torch.arange(first, first + p.numel()).view(p.shape)
        first += p.numel()
    return params, first


@settings(deadline=None, max_examples=60)
@given(models())
def test_there_and_back_changes_no_bit_and_loses_no_element(config):
    params, elements = _numbered(config)
    found = origins(family_of(config), params)
    tensors = to_family(found, params)
    assert torch.cat([tensor.flatten() for tensor in tensors.values()]).sort().values.tolist() == list(range(elements))
    back = to_forge(found, tensors, params)
    assert back.keys() == params.keys() and all(torch.equal(back[name], params[name]) for name in params)


@settings(deadline=None, max_examples=40)
@given(models())
def test_units_can_be_converted_one_by_one(config):
    params, _ = _numbered(config)
    found = origins(family_of(config), params)
    tensors, apart = to_family(found, params), {}
    for targets, names in units(found).items():
        part = to_family(found, {name: params[name] for name in names})
        assert set(part) == set(targets)
        apart |= part
    assert apart.keys() == tensors.keys() and all(torch.equal(apart[name], tensors[name]) for name in tensors)


def test_gpt2_packs_query_key_and_value_by_columns():
    params, _ = _numbered(model("gpt2"))
    packed = to_family(origins(family_of(model("gpt2")), params), params)["transformer.h.1.attn.c_attn.weight"]
    rows = [params[f"blocks.1.attn.{name}.weight"] for name in ("wq", "wk", "wv")]
    assert torch.equal(packed, torch.cat(rows).T)


def test_constants_of_old_files_are_told_from_weights():
    assert is_buffer("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert is_buffer("transformer.h.3.attn.bias") and is_buffer("transformer.h.3.attn.masked_bias")
    assert not is_buffer("transformer.h.3.attn.c_attn.bias")
