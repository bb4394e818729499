"""Generation: the cache and the other rows change nothing, sampling obeys its limits, and seeds decide."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from forge.config import ModelConfig, MoEConfig
from forge.errors import ConfigError, RunError
from forge.model import build_model, init_params
from forge.training.generate import Sampling, generate, sample
from forge.training.reading import open_reader

CONFIG = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=13, max_seq_len=12, init_std=0.3)
PROMPTS = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
GREEDY = Sampling(temperature=0)
VARIANTS = {
    "plain": CONFIG,
    "learned positions": evolve(CONFIG, position="learned", tied_embeddings=True),
    "shared keys, norms on heads": evolve(CONFIG, n_kv_heads=1, qk_norm=True),
    "window": evolve(CONFIG, sliding_window=3),
    "experts": evolve(CONFIG, moe=MoEConfig(n_experts=4, top_k=2, expert_hidden_dim=16)),
    "sigmoid experts": evolve(CONFIG, moe=MoEConfig(n_experts=4, router="sigmoid", expert_hidden_dim=16)),
}
PARAMS = {name: init_params(build_model(config), config, 0) for name, config in VARIANTS.items()}


def _tokens(prompts=PROMPTS, sampling=GREEDY, variant="plain", max_new_tokens=8, **options):
    config = VARIANTS[variant]
    with open_reader(build_model(config), PARAMS[variant], {}) as read:
        found = generate(
            read, prompts, sampling, max_new_tokens=max_new_tokens, max_seq_len=config.max_seq_len, **options
        )
        return torch.stack(list(found), dim=1)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_one_line(sampling, spoilt):
    logits = iter([torch.zeros(1, 13), torch.zeros(1, 13).index_fill(1, torch.tensor([4]), spoilt)])
    made = generate(lambda *_: next(logits), [torch.tensor([1])], sampling, max_new_tokens=3, max_seq_len=9)
    next(made)
    with pytest.raises(RunError, match="logits are not finite after 1 tokens"):
        next(made)


def _recomputed(prompt, variant, max_new_tokens):
    """The likeliest tokens of one row, the whole of it read again for each."""
    config, context, made = VARIANTS[variant], prompt[-CONFIG.max_seq_len :], []
    for _ in range(max_new_tokens):
        made.append(functional_call(build_model(config), PARAMS[variant], (context[None],))[0, -1].argmax())
        context = torch.cat((context, made[-1][None]))
        if context.numel() > config.max_seq_len:
            context = context[-(config.max_seq_len // 2) :]
    return torch.stack(made)


def _rows(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 13, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_generation_equals_full_recomputation(variant):
    expected = [_recomputed(prompt, variant, 24) for prompt in PROMPTS]
    assert torch.equal(_tokens(variant=variant, max_new_tokens=24), torch.stack(expected))


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
    variant=st.sampled_from(list(VARIANTS)),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_row_is_what_it_would_be_alone(lengths, seed, variant, temperature):
    rows, sampling = _rows(lengths, seed), Sampling(temperature=temperature)
    seeds = [seed + place for place in range(len(rows))]
    together = _tokens(rows, sampling, variant, max_new_tokens=16, seeds=seeds)
    for row, own, made in zip(rows, seeds, together, strict=True):
        assert torch.equal(_tokens([row], sampling, variant, max_new_tokens=16, seeds=[own])[0], made)


def test_experts_take_every_token_while_they_generate_and_have_their_capacity_back_afterwards():
    config = evolve(CONFIG, moe=MoEConfig(n_experts=4, top_k=2, expert_hidden_dim=16, capacity_factor=0.3))
    model = build_model(config)
    with open_reader(model, PARAMS["experts"], {}) as read:
        made = list(generate(read, PROMPTS, GREEDY, max_new_tokens=8, max_seq_len=12))
    assert torch.equal(torch.stack(made, dim=1), _tokens(variant="experts"))
    assert model.blocks["0"].mlp.capacity_factor == 0.3


def test_generation_goes_on_past_the_longest_sequence():
    assert _tokens(max_new_tokens=40).shape == (2, 40)


def test_the_seed_of_a_row_decides_and_the_global_rng_is_not_touched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (_tokens(sampling=Sampling(), seeds=seeds) for seeds in ([1, 2], [1, 2], [1, 3]))
    assert torch.equal(first, again) and torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.9), {0, 1, 2}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(min_p=0.25), {0, 1, 2}),  # 0.15 >= 0.25 * 0.5 > 0.05
        (Sampling(min_p=0.31), {0, 1}),
        (Sampling(min_p=1.0), {0}),
        (Sampling(top_k=3, top_p=0.99, min_p=0.31), {0, 1}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_limits_keep_the_likeliest_only(sampling, kept):
    logits = torch.log(torch.tensor([[0.15, 0.5, 0.05, 0.3]])).expand(500, 4)
    draws = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    likeliest_first = [1, 3, 0, 2]
    assert {likeliest_first.index(token) for token in sample(logits, sampling, draws).tolist()} == kept


def test_top_p_is_a_share_of_what_top_k_keeps():
    """As transformers' TopKLogitsWarper and TopPLogitsWarper one after the other."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(100, 4)
    draws = torch.linspace(0, 0.99, 100, dtype=torch.float64)
    assert set(sample(logits, Sampling(top_k=2, top_p=0.5), draws).tolist()) == {0}
    assert set(sample(logits, Sampling(top_p=0.5), draws).tolist()) == {0, 1}


def test_tokens_are_drawn_as_often_as_they_are_likely():
    chances = torch.tensor([0.15, 0.5, 0.05, 0.3])
    draws = torch.linspace(0, 1, 10001, dtype=torch.float64)[:-1]
    found = sample(chances.log().expand(10000, 4), Sampling(), draws).bincount(minlength=4) / 10000
    torch.testing.assert_close(found, chances, rtol=0, atol=2e-4)


def test_the_largest_draw_takes_the_last_token_that_is_kept():
    logits = torch.zeros(1, 7)
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(sample(logits, Sampling(top_k=3), last)) == 2


def test_generation_ends_when_every_row_met_the_stop_token():
    greedy = _tokens()
    stop = int(greedy[0, 2])
    stopped = _tokens(stop_id=stop)
    assert (stopped[0, 2:] == stop).all() or stop in greedy[0, :2].tolist()


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}]
)
def test_an_impossible_sampling_parameter_is_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Sampling(**options)


@pytest.mark.parametrize("prompts", [[], [torch.empty(0, dtype=torch.long)]])
def test_an_empty_prompt_is_refused(prompts):
    with pytest.raises(ConfigError, match="prompt"):
        _tokens(prompts)
