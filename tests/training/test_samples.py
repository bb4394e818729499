"""Text from a model: the prompt and its continuation, the same for a seed, or one line that says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import JobConfig, ModelConfig
from forge.data import build_tokenizer
from forge.errors import ConfigError
from forge.files import step_lines
from forge.model import build_model, init_params
from forge.training.generate import Sampling
from forge.training.parts import build_parts
from forge.training.runtime import build_runtime
from forge.training.samples import TextStream, record_sample, sample_texts

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=257, max_seq_len=16)
JOB = JobConfig(
    model=MODEL,
    train=evolve(JobConfig().train, seq_len=16),
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


def _texts(params, prompts=("ab",), *, job=JOB, temperature=0.0, max_new_tokens=5, **options):
    parts, sampling = build_parts(job, build_runtime(job)), Sampling(temperature=temperature)
    made = sample_texts(job, parts, params, {}, BYTES, prompts, sampling, max_new_tokens=max_new_tokens, **options)
    return [sample.text for sample in made]


def test_the_prompt_is_continued_by_what_the_model_says():
    assert _texts(_always(ord("z"))) == ["abzzzzz"]
    assert _texts(_always(ord("z")), ["é", "abc"], max_new_tokens=2) == ["ézz", "abczz"]


def test_it_stops_at_the_end_of_a_document():
    assert _texts(_always(256), max_new_tokens=100) == ["ab"]


def test_it_stops_before_a_stop_string_and_counts_what_was_read_until_then():
    parts = build_parts(JOB, build_runtime(JOB))
    made = sample_texts(
        JOB, parts, _always(ord("z")), {}, BYTES, ["ab", "a"], Sampling(0), max_new_tokens=9, stop=["zzz"]
    )  # fmt: skip
    assert [(sample.text, sample.tokens) for sample in made] == [("ab", 3), ("a", 3)]


def test_a_seed_decides_and_the_global_generator_is_left_alone():
    def text(seed):
        return _texts(_params(), max_new_tokens=12, temperature=1.0, seed=seed)

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = text(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert text(0) == first != text(1)


@settings(deadline=None, max_examples=10)
@given(prompts=st.lists(st.text(min_size=1, max_size=30), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_a_text_does_not_depend_on_the_prompts_beside_it(prompts, seed):
    options = {"temperature": 1.0, "seed": seed, "max_new_tokens": 20, "stop": ["e", "\x00"]}
    alone = [_texts(_params(), [prompt], **options)[0] for prompt in prompts]
    assert _texts(_params(), prompts, **options) == alone


def test_further_texts_of_a_prompt_are_those_of_the_next_seeds():
    options = {"temperature": 1.0, "max_new_tokens": 12}
    made = _texts(_params(), ["ab", "c"], samples=3, seed=5, **options)
    assert made == [
        _texts(_params(), [prompt], seed=seed, **options)[0] for prompt in ("ab", "c") for seed in (5, 6, 7)
    ]
    assert len(set(made)) == 6


TEXT = st.text(alphabet="abé€", max_size=30)


@settings(deadline=None)
@given(text=TEXT, stops=st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3), eod=st.booleans())
def test_streamed_pieces_are_the_text_before_the_stop_string_that_is_complete_first(text, stops, eod):
    stream = TextStream(BYTES, BYTES.encode("prompt").tolist(), stops)
    pieces = [stream.add(token) for token in [*BYTES.encode(text).tolist(), *([256, 97] if eod else [])]]
    pieces.append(stream.end())
    complete = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == stream.text == text[: min(complete)[1] if complete else len(text)]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 256), max_size=20))
def test_any_bytes_become_the_text_that_they_are_decoded_to_at_once(ids):
    stream = TextStream(BYTES)
    for token in ids:
        stream.add(token)
    stream.end()
    before_end = ids[: ids.index(256)] if 256 in ids else ids
    assert stream.text == BYTES.decode(before_end)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_decided():
    stream = TextStream(BYTES, stop=["abc"])
    assert [stream.add(ord(letter)) for letter in "xababd"] == ["x", "", "", "ab", "", "abd"]


def test_a_prompt_longer_than_the_model_can_read_is_cut_to_its_end():
    assert _texts(_always(ord("z")), ["a" * 40], max_new_tokens=1) == ["a" * 40 + "z"]


def test_no_new_tokens_give_the_prompt():
    assert _texts(_params(), max_new_tokens=0) == ["ab"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": ["ab", ""]}, "the prompt is empty"),
        ({"stop": ["x", ""]}, "a stop string is empty"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
    ],
)
def test_an_impossible_request_is_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _texts(_params(), **options)
    assert "\n" not in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_refused():
    small = evolve(MODEL, vocab_size=100)
    with pytest.raises(ConfigError, match=r"token 122, beyond model\.vocab_size = 100"):
        _texts(_params(small), ["az"], job=evolve(JOB, model=small))


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
    assert capsys.readouterr().err.count("the sample cannot be kept") == 1


def test_what_a_full_disk_left_of_a_sample_does_not_keep_others_from_being_kept(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1, "text": "one"}\n{"step": 2, "te')
    record_sample(path, 3, "three")
    assert [text["text"] for _, text in step_lines(path)] == ["one", "three"]
