"""Text from a model: the prompt and its continuation, the same for a seed, or one line that says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve

from forge.config import EvalConfig, JobConfig, ModelConfig
from forge.data import build_tokenizer
from forge.errors import ConfigError
from forge.model import build_model, init_params
from forge.training.samples import record_sample, sample_text

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=257, max_seq_len=16)
JOB = JobConfig(
    model=MODEL,
    train=evolve(JobConfig().train, seq_len=16),
    eval=EvalConfig(sample_tokens=5, sample_prompt="ab", sample_temperature=0.0),
)
BYTES = build_tokenizer("bytes")


def _params(config=MODEL):
    return init_params(build_model(config), config, 0)


def _always(token: int):
    """Parameters of a model that says one token whatever it reads: the residual stream is the same everywhere."""
    params = {name: torch.zeros_like(p) for name, p in _params().items()}
    params["embed.weight"][:] = 1.0
    params["norm.weight"][:] = 1.0
    params["head.weight"][token] = 1.0
    return params


def test_the_prompt_is_continued_by_what_the_model_says():
    assert sample_text(JOB, _always(ord("z")), {}, BYTES) == "abzzzzz"
    assert sample_text(JOB, _always(ord("z")), {}, BYTES, prompt="é", max_new_tokens=2) == "ézz"


def test_it_stops_at_the_end_of_a_document():
    assert sample_text(JOB, _always(256), {}, BYTES, max_new_tokens=100) == "ab"


def test_what_is_not_given_comes_from_the_config():
    asked = sample_text(JOB, _params(), {}, BYTES, prompt="ab", max_new_tokens=5, temperature=0.0)
    assert sample_text(JOB, _params(), {}, BYTES) == asked


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    def text(seed):
        return sample_text(JOB, _params(), {}, BYTES, max_new_tokens=12, temperature=1.0, seed=seed)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = text(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert text(0) == first != text(1)


def test_a_prompt_longer_than_the_model_can_read_is_cut_to_its_end():
    assert sample_text(JOB, _always(ord("z")), {}, BYTES, prompt="a" * 40, max_new_tokens=1) == "a" * 40 + "z"


def test_no_new_tokens_give_the_prompt():
    assert sample_text(JOB, _params(), {}, BYTES, max_new_tokens=0) == "ab"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
    ],
)
def test_an_impossible_request_is_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        sample_text(JOB, _params(), {}, BYTES, **options)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_refused():
    small = evolve(MODEL, vocab_size=100)
    with pytest.raises(ConfigError, match=r"token 122, beyond model\.vocab_size = 100"):
        sample_text(evolve(JOB, model=small), _params(small), {}, BYTES, prompt="az")


def test_a_sample_takes_the_place_of_those_from_its_step_on(tmp_path):
    path = tmp_path / "samples.jsonl"
    for step, text in [(2, "two"), (4, "é\n"), (6, "six"), (4, "again")]:
        record_sample(path, step, text)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 2, "text": "two"}, {"step": 4, "text": "again"}]
    assert list(tmp_path.iterdir()) == [path]


def test_a_sample_that_cannot_be_kept_is_a_warning(tmp_path, capsys):
    (tmp_path / "file").touch()
    record_sample(tmp_path / "file" / "samples.jsonl", 1, "text")
    (tmp_path / "samples.jsonl").write_text("no json\n")
    record_sample(tmp_path / "samples.jsonl", 1, "text")
    assert capsys.readouterr().err.count("the sample cannot be kept") == 2
    assert (tmp_path / "samples.jsonl").read_text() == "no json\n"
