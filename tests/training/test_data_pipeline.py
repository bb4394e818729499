"""Data of a config: the same batches every time, and a mistake named before anything is trained."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from attrs import evolve

from forge.config import (
    DataConfig,
    DataPhase,
    DataSource,
    EvalConfig,
    EvalSource,
    JobConfig,
    ModelConfig,
    TrainConfig,
)
from forge.data import IteratorStream, build_tokenizer, prepare
from forge.errors import DataError
from forge.pytree import tree_equal
from forge.training.data_pipeline import build_data_pipeline, open_feed, prepare_data


@pytest.fixture
def job(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for n in range(8):
        (text / f"{n}.txt").write_text(" ".join(f"{n} times {k} is {n * k};" for k in range(30)))
    return JobConfig(
        model=ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=257, max_seq_len=16),
        train=TrainConfig(steps=8, seq_len=16, global_batch_size=4, micro_batch_size=2),
        data=DataConfig(path=str(text), eval_fraction=0.2, cache_dir=str(tmp_path / "cache")),
        eval=EvalConfig(interval=4, batches=2, batch_size=3),
    )


def test_batches_have_the_shapes_that_the_config_asks_for(job):
    data = build_data_pipeline(job)
    batch = data.batch_at(0)
    assert batch.input_ids.shape == batch.labels.shape == batch.doc_ids.shape == (2, 2, 16)
    assert [held.input_ids.shape for held in data.eval_sets[0].batches] == [(1, 3, 16), (1, 3, 16)]
    assert data.eval_sets[0].bytes_per_token == pytest.approx(1.0, abs=0.01)
    assert data.samples > 100


def test_batches_depend_on_step_and_data_seed_only(job):
    first, again = build_data_pipeline(job), build_data_pipeline(job)
    torch.manual_seed(5)
    assert tree_equal(first.batch_at(7), again.batch_at(7))
    assert not tree_equal(first.batch_at(7), first.batch_at(8))
    other = build_data_pipeline(evolve(job, train=evolve(job.train, data_seed=1, seed=9)))
    assert not tree_equal(first.batch_at(7), other.batch_at(7))
    assert tree_equal(first.batch_at(7), build_data_pipeline(evolve(job, train=evolve(job.train, seed=9))).batch_at(7))


def test_ranks_share_the_global_batch(job):
    whole = build_data_pipeline(job).batch_at(3).input_ids.flatten(0, 1)
    parts = [build_data_pipeline(job, rank=rank, ranks=2).batch_at(3).input_ids.flatten(0, 1) for rank in range(2)]
    rows = sorted(tuple(row) for part in parts for row in part.tolist())
    assert rows == sorted(tuple(row) for row in whole.tolist())


def test_held_out_batches_are_the_same_at_every_iteration(job):
    held_out = build_data_pipeline(job).eval_sets[0].batches
    assert all(tree_equal(a, b) for a, b in zip(held_out, held_out, strict=True))


def test_without_evaluation_nothing_is_held_open(job):
    assert build_data_pipeline(evolve(job, eval=EvalConfig(interval=0))).eval_sets == ()


def test_text_is_tokenised_once_with_progress(job):
    seen = []
    prepare_data(job, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] == seen[-1][1]
    prepare_data(job, progress=lambda *_: pytest.fail("tokenised again"))


def test_a_prepared_folder_is_the_same_data_wherever_it_lies(job, tmp_path):
    from_text = build_data_pipeline(job)
    for name in ("a", "b"):
        prepare(job.data.path, tmp_path / name, build_tokenizer("bytes"), eval_fraction=0.2)
        folder = build_data_pipeline(evolve(job, data=evolve(job.data, path=str(tmp_path / name))))
        assert folder.fingerprint == from_text.fingerprint
        assert tree_equal(folder.batch_at(2), from_text.batch_at(2))


def test_other_text_has_another_fingerprint(job, tmp_path):
    before = build_data_pipeline(job).fingerprint
    (tmp_path / "text" / "0.txt").write_text("other text " * 50)
    assert build_data_pipeline(job).fingerprint != before


def test_a_vocabulary_smaller_than_the_tokens_is_refused(job):
    with pytest.raises(DataError, match=r"257 does not fit model\.vocab_size = 256"):
        build_data_pipeline(evolve(job, model=evolve(job.model, vocab_size=256)))


def test_a_larger_vocabulary_than_the_tokenizers_is_fine(job):
    assert build_data_pipeline(evolve(job, model=evolve(job.model, vocab_size=300))).tokenizer.vocab_size == 257


def test_evaluation_without_held_out_text_is_refused(job):
    with pytest.raises(DataError) as caught:
        build_data_pipeline(evolve(job, data=evolve(job.data, eval_fraction=0.0)))
    assert "\n" not in str(caught.value) and "eval" in str(caught.value)


def test_a_folder_of_another_tokenizer_is_refused(job, tmp_path):
    prepare(job.data.path, tmp_path / "prepared", build_tokenizer("bytes"), eval_fraction=0.2)
    manifest = tmp_path / "prepared" / "manifest.json"
    manifest.write_text(
        manifest.read_text()
        .replace('"tokenizer": "bytes"', '"tokenizer": "other.json"')
        .replace('"eod_id": 256', '"eod_id": 0')
    )
    with pytest.raises(DataError, match=r"was tokenised by 'other\.json'"):
        build_data_pipeline(evolve(job, data=evolve(job.data, path=str(tmp_path / "prepared"))))


def test_data_shorter_than_one_sequence_is_refused(job):
    model, train = evolve(job.model, max_seq_len=10**6), evolve(job.train, seq_len=10**6)
    with pytest.raises(DataError, match="one sequence"):
        build_data_pipeline(evolve(job, model=model, train=train))


@pytest.fixture
def mixed(job, tmp_path):
    """Two sources, the second of capital letters, and a phase of the second alone."""
    (tmp_path / "capitals").mkdir()
    for n in range(8):
        (tmp_path / "capitals" / f"{n}.txt").write_text(" ".join(f"{n} TIMES {k} IS {n * k}" for k in range(30)))
    sources = (DataSource("low", job.data.path, 3.0), DataSource("high", str(tmp_path / "capitals")))
    data = evolve(job.data, path="unread", sources=sources, phases=(DataPhase(5, {"high": 1.0}),))
    return evolve(job, data=data)


def test_sources_are_mixed_by_weight_and_phase_and_each_sequence_tells_its_own(mixed):
    data = build_data_pipeline(mixed)
    batches = [data.batch_at(step) for step in range(8)]
    drawn = torch.stack([batch.source_ids.flatten() for batch in batches])
    assert drawn.sum(dim=1).tolist() == [1, 1, 1, 1, 1, 4, 4, 4]
    for batch in batches:
        capitals = ((batch.input_ids >= ord("A")) & (batch.input_ids <= ord("Z"))).any(-1)
        assert torch.equal(capitals, batch.source_ids == 1)
    assert data.samples == sum(
        build_data_pipeline(evolve(mixed, data=mixed.data.alone(source.path))).samples for source in mixed.data.sources
    )


def test_each_source_has_its_held_out_part_by_name_and_further_sets_follow(mixed, tmp_path):
    (tmp_path / "far.txt").write_text("a text that was never trained on, as a whole")
    prepare(mixed.data.sources[0].path, tmp_path / "folder", build_tokenizer("bytes"), eval_fraction=0.2)
    sets = (EvalSource("far", str(tmp_path / "far.txt")), EvalSource("folder", str(tmp_path / "folder")))
    found = build_data_pipeline(evolve(mixed, eval=evolve(mixed.eval, sets=sets))).eval_sets
    assert [(each.name, each.held_out) for each in found] == [
        ("low", True), ("high", True), ("far", False), ("folder", False),
    ]  # fmt: skip
    low, _, far, folder = (list(each.batches) for each in found)
    assert tree_equal(low, folder)
    (batch,) = far
    assert bytes(batch.input_ids[0].flatten().tolist()[:14]) == b"a text that wa"


def test_without_held_out_text_further_sets_are_the_evaluation(job, tmp_path):
    (tmp_path / "far.txt").write_text("a text that was never trained on, as a whole")
    config = evolve(job, data=evolve(job.data, eval_fraction=0.0))
    config = evolve(config, eval=evolve(job.eval, sets=(EvalSource("far", str(tmp_path / "far.txt")),)))
    assert [each.name for each in build_data_pipeline(config).eval_sets] == ["far"]
    off = evolve(config, eval=evolve(config.eval, interval=0, sets=(EvalSource("far", "/no/such/file"),)))
    assert build_data_pipeline(off).eval_sets == ()


def test_the_fingerprint_tells_sources_apart(mixed):
    swapped = [evolve(a, path=b.path) for a, b in zip(mixed.data.sources, reversed(mixed.data.sources), strict=True)]
    other = evolve(mixed, data=evolve(mixed.data, sources=tuple(swapped)))
    assert build_data_pipeline(mixed).fingerprint != build_data_pipeline(other).fingerprint


def test_a_stream_is_named_by_its_path_and_has_no_function_of_the_step(job, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = evolve(job.data, path=f"hf-stream:{job.data.path}")
    data = build_data_pipeline(evolve(job, data=text, eval=EvalConfig(interval=0)))
    with closing(open_feed(data, text, 0, 8)) as feed:
        first = next(feed)
        assert first.input_ids.shape == (2, 2, 16) and feed.position["batches"] == 1
        second = next(feed)
    resumed = open_feed(data, text, 2, 8, position=feed.position, index_at=lambda step: step + 1)
    with closing(open_feed(data, text, 0, 8)) as straight:
        batches = [next(straight) for _ in range(4)]
    with closing(resumed):
        assert tree_equal([first, second, next(resumed)], [*batches[:2], batches[3]])
    with pytest.raises(DataError, match="read forward only"):
        data.batch_at(0)


def test_a_feed_jumps_where_it_is_told_to(job):
    data = build_data_pipeline(job)
    with closing(open_feed(data, evolve(job.data, workers=3), 2, 6, index_at=lambda step: 10 * step)) as feed:
        found = list(feed)
    assert tree_equal(found, [data.batch_at(10 * step) for step in range(2, 6)]) and feed.position is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "hf-stream:x", "sources": (DataSource("a", "x"),)}, "cannot be mixed"),
        ({"path": "hf-stream:/no/such"}, "cannot be opened"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(job, changes, message):
    stream = IteratorStream(lambda start: ["a text"]) if "sources" in changes else None
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=message):
        config = evolve(job, data=evolve(job.data, **changes), eval=EvalConfig(interval=0))
        build_data_pipeline(config, stream=stream)


def test_a_stream_among_sources_is_refused_before_any_is_prepared(job):
    sources = (DataSource("a", job.data.path), DataSource("b", "hf-stream:name"))
    with pytest.raises(DataError, match=r"data\.sources 'b': hf-stream:name is a stream.* prepare it: 'hf:name'"):
        prepare_data(evolve(job, data=evolve(job.data, sources=sources)))
    assert not Path(job.data.cache_dir).exists()


def test_a_stream_to_evaluate_on_is_refused_before_any_data_is_prepared(job):
    sets = EvalConfig(interval=5, sets=(EvalSource("b", "hf-stream:name"),))
    with pytest.raises(DataError, match=r"eval\.sets 'b': hf-stream:name is a stream.* prepare it: 'hf:name'"):
        prepare_data(evolve(job, eval=sets))
    assert not Path(job.data.cache_dir).exists()


def test_a_stream_whose_end_of_document_the_model_does_not_know_is_refused(job):
    small = evolve(job, model=evolve(job.model, vocab_size=256), eval=EvalConfig(interval=0))
    with pytest.raises(DataError, match=r"ends documents with id 256, outside model\.vocab_size = 256"):
        build_data_pipeline(small, stream=IteratorStream(lambda start: ["a text"]))


def test_batches_for_a_device_are_pinned_where_they_are_made(job, monkeypatch):
    data = build_data_pipeline(job)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(threading.current_thread()) or tensor)
    with closing(open_feed(data, job.data, 0, 1, pin=True)) as feed:
        assert tree_equal(next(feed), data.batch_at(0))
    assert len(pinned) == 3 and threading.main_thread() not in pinned
