"""Generation: the cache changes nothing, sampling obeys its limits, and seeds decide."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from forge.config import ModelConfig
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.training.generate import generate, sample

CONFIG = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=12, init_std=0.3)
MODEL = build_model(CONFIG)
PARAMS = init_params(MODEL, CONFIG, 0)
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def _tokens(**options):
    return torch.stack(list(generate(MODEL, PARAMS, PROMPT, **options)), dim=1)


def test_greedy_generation_equals_full_recomputation():
    expected = PROMPT
    for _ in range(8):
        expected = torch.cat((expected, functional_call(MODEL, PARAMS, (expected,))[:, -1].argmax(-1)[:, None]), 1)
    assert torch.equal(_tokens(max_new_tokens=8, temperature=0), expected[:, 3:])


def test_generation_goes_on_past_the_longest_sequence():
    assert _tokens(max_new_tokens=40, temperature=0).shape == (2, 40)


def test_the_seed_decides_and_the_global_rng_is_not_touched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (_tokens(max_new_tokens=8, seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_top_k_and_top_p_keep_the_likeliest_only():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(500, 4)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, 1.0, 2, None, generator).tolist()) == {0, 1}
    assert set(sample(logits, 1.0, None, 0.9, generator).tolist()) == {0, 1, 2}
    assert set(sample(logits, 1.0, None, 0.4, generator).tolist()) == {0}
    assert set(sample(logits, 1.0, None, None, generator).tolist()) == {0, 1, 2, 3}


def test_generation_ends_when_every_row_met_the_stop_token():
    greedy = _tokens(max_new_tokens=8, temperature=0)
    stop = int(greedy[0, 2])
    stopped = _tokens(max_new_tokens=8, temperature=0, stop_id=stop)
    assert (stopped[0, 2:] == stop).all() or stop in greedy[0, :2].tolist()


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_an_impossible_sampling_parameter_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        _tokens(max_new_tokens=1, **options)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="prompt"):
        list(generate(MODEL, PARAMS, torch.empty(1, 0, dtype=torch.long), max_new_tokens=1))
