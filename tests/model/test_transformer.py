"""The model: what it can and cannot see, what its options mean, and that its cache equals full recomputation."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional as F

from forge.config import ModelConfig
from forge.model import build_model, init_params
from forge.model.cache import Cache

SMALL = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=19, max_seq_len=32)


def _logits(config: ModelConfig, ids, doc_ids=None, seed: int = 0):
    model = build_model(config)
    return functional_call(model, init_params(model, config, seed), (ids, doc_ids))


def _ids(batch: int = 2, length: int = 12, seed: int = 0):
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(seed))


VARIANTS = {
    "llama": SMALL,
    "gpt2": evolve(
        SMALL, n_kv_heads=4, norm="layernorm", mlp="gelu", bias=True, position="learned", tied_embeddings=True
    ),
    "qwen3": evolve(SMALL, qk_norm=True, head_dim=6),
    "qwen2": evolve(SMALL, qkv_bias=True, tied_embeddings=True),
    "gemma": evolve(SMALL, n_kv_heads=1, mlp="geglu", logit_softcap=5.0),
    "window": evolve(SMALL, sliding_window=3, mlp="relu2"),
    "llama3": evolve(SMALL, rope_scaling_factor=8.0, rope_original_max_seq_len=8),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_token_changes_no_logit_before_it(config):
    ids = _ids()
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 19
    before, after = _logits(config, ids), _logits(config, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_loss_at_initialisation_is_about_ln_vocab(config):
    ids = _ids(8, 32)
    loss = F.cross_entropy(_logits(config, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(19), abs=0.15)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_cache_equals_full_recomputation(config):
    model = build_model(config)
    params = init_params(model, config, 0)
    ids = _ids()
    past, pieces = Cache(), []
    for part in ids.split([5, 1, 1, 4, 1], dim=1):
        pieces.append(functional_call(model, params, (part,), {"past": past}))
        past.advance(part.shape[1])
    torch.testing.assert_close(torch.cat(pieces, dim=1), _logits(config, ids), rtol=1e-4, atol=1e-5)


def test_a_document_does_not_see_the_one_before_it():
    ids = torch.tensor([[5, 6, 0, 7, 8, 0]])
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    changed = ids.clone()
    changed[0, 0] = 9
    before, after = _logits(SMALL, ids, doc_ids), _logits(SMALL, changed, doc_ids)
    assert torch.equal(before[:, 3:], after[:, 3:])
    assert not torch.allclose(_logits(SMALL, ids)[:, 3:], _logits(SMALL, changed)[:, 3:])


DOCUMENTS = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@settings(deadline=None, max_examples=20)
@given(lengths=DOCUMENTS, variant=st.sampled_from(list(VARIANTS)))
def test_restarted_positions_make_a_packed_document_what_it_is_alone(lengths, variant):
    config = evolve(VARIANTS[variant], restart_positions=True)
    ids, doc_ids = _ids(1, sum(lengths)), torch.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    packed = _logits(config, ids, doc_ids).split(lengths, dim=1)
    for part, document in zip(packed, ids.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(part, _logits(config, document), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(lengths=DOCUMENTS)
def test_within_documents_rotary_attention_knows_distances_only_and_learned_positions_places(lengths):
    ids, doc_ids = _ids(1, sum(lengths)), torch.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    for config, same in ((SMALL, True), (VARIANTS["gpt2"], len(lengths) == 1)):
        counted, restarted = (_logits(evolve(config, restart_positions=on), ids, doc_ids) for on in (False, True))
        assert torch.allclose(counted, restarted, rtol=1e-4, atol=1e-5) == same


def test_one_document_is_plain_causal_attention():
    ids = _ids()
    torch.testing.assert_close(_logits(SMALL, ids, torch.zeros_like(ids)), _logits(SMALL, ids))


@settings(deadline=None, max_examples=20)
@given(window=st.integers(1, 6), layers=st.integers(1, 2))
def test_a_window_reaches_exactly_layers_times_window_minus_one_tokens_back(window, layers):
    config = evolve(SMALL, sliding_window=window, n_layers=layers)
    ids = _ids(1, 16)
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 19
    same = (_logits(config, ids) == _logits(config, changed)).all(dim=-1)[0]
    reach = layers * (window - 1)
    assert not same[0] and same[reach + 1 :].all()


def test_grouped_keys_equal_repeated_keys():
    model, full = build_model(SMALL), build_model(evolve(SMALL, n_kv_heads=4))
    params = init_params(model, SMALL, 0)
    repeated = {
        name: p.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) if ".wk." in name or ".wv." in name else p
        for name, p in params.items()
    }
    torch.testing.assert_close(functional_call(model, params, (_ids(),)), functional_call(full, repeated, (_ids(),)))


def test_tied_embeddings_are_one_parameter():
    model = build_model(evolve(SMALL, tied_embeddings=True))
    assert "head.weight" not in dict(model.named_parameters())


def test_the_soft_cap_bounds_the_logits():
    params = {name: p * 100 for name, p in init_params(build_model(SMALL), SMALL, 0).items()}
    capped = functional_call(build_model(evolve(SMALL, logit_softcap=3.0)), params, (_ids(),))
    assert capped.abs().max() <= 3.0


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_backends_agree(backend):
    torch.testing.assert_close(_logits(evolve(SMALL, attention_backend=backend), _ids()), _logits(SMALL, _ids()))


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**40), layers=st.integers(1, 3))
def test_weights_depend_on_seed_and_name_only(seed, layers):
    small, deep = evolve(SMALL, n_layers=layers), evolve(SMALL, n_layers=layers + 1)
    first, second = (init_params(build_model(c), c, seed) for c in (small, deep))
    for name, p in first.items():
        if not name.endswith(("wo.weight", "w_down.weight")):  # scaled by depth, by design
            assert torch.equal(p, second[name])
    assert not torch.equal(first["embed.weight"], init_params(build_model(small), small, seed + 1)["embed.weight"])


def test_initial_weights_have_the_stated_spread():
    config = evolve(SMALL, dim=128, n_heads=4, n_layers=8)
    params = init_params(build_model(config), config, 0)
    assert float(params["blocks.0.mlp.w_up.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(params["blocks.0.mlp.w_down.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert (params["norm.weight"] == 1).all()
