"""Thousands of files can be open at once, and a file that changed under the reader is named."""

from __future__ import annotations

import contextlib
import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import TokenDataset, build_batch_at, prefetch, write_shard
from forge.data.shard import open_shard
from forge.data.stored import FILES_KEPT, stored_in
from forge.errors import DataError


def _stored(path, numbers):
    np.array(numbers, np.uint16).tofile(path)
    return stored_in(path, np.dtype("<u2"), 0, len(numbers))


@settings(deadline=None)
@given(data=st.data(), length=st.integers(0, 20))
def test_it_reads_as_the_array_does_and_so_does_a_part(tmp_path_factory, data, length):
    stored = _stored(tmp_path_factory.mktemp("stored") / "a", range(length))
    start = data.draw(st.integers(0, length))
    n = data.draw(st.integers(0, length - start))
    assert len(stored) == length and stored[:].tolist() == list(range(length))
    assert len(stored.part(start, n)) == n
    assert stored.part(start, n)[:].tolist() == stored[start : start + n].tolist() == list(range(start, start + n))


def test_more_files_than_a_process_may_open_are_one_stream(tmp_path):
    n = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if n > 4096:
        resource_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        n = 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, resource_limit[1]))
    else:
        resource_limit = None
    try:
        write_shard(tmp_path / "0", [np.arange(3)], vocab_size=9, eod_id=8)
        for index in range(1, n + 10):
            os.link(tmp_path / "0", tmp_path / str(index))
        dataset = TokenDataset(tmp_path, tuple(open_shard(tmp_path / str(index)) for index in range(n + 10)))
        assert dataset.read(0, dataset.n_tokens).tolist() == [0, 1, 2, 8] * (n + 10)
        assert len(os.listdir("/proc/self/fd")) < FILES_KEPT + 200
    finally:
        if resource_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, resource_limit)


def test_a_file_that_took_the_place_of_another_is_read_as_itself(tmp_path):
    before = _stored(tmp_path / "a", [1, 2])
    assert before[:].tolist() == [1, 2]
    _stored(tmp_path / "b", [3, 4])
    os.replace(tmp_path / "b", tmp_path / "a")
    assert stored_in(tmp_path / "a", np.dtype("<u2"), 0, 2)[:].tolist() == [3, 4]


def test_a_file_that_is_removed_before_it_is_read_is_named(tmp_path):
    gone = _stored(tmp_path / "gone", [1, 2])
    (tmp_path / "gone").unlink()
    with pytest.raises(DataError, match=r"gone: gone since it was opened \(No such file or directory\)"):
        gone[:1]


@pytest.mark.parametrize("pages", [0, 1])
def test_a_file_that_is_cut_while_it_is_read_is_named_with_the_place(tmp_path, pages):
    cut = _stored(tmp_path / "cut", range(20_000))
    assert cut[19_999:].tolist() == [19_999]
    os.truncate(tmp_path / "cut", pages * 4096)
    with pytest.raises(DataError, match=r"cut: cut short since it was opened: it ends before byte 40000"):
        cut[19_000:]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_file_that_is_cut_under_the_batches_made_ahead_is_named_by_the_batch_that_meets_it(tmp_path, depth):
    write_shard(tmp_path / "cut", [np.arange(8000) % 9], vocab_size=10, eod_id=9)
    dataset = TokenDataset(tmp_path, (open_shard(tmp_path / "cut"),))
    batch_at = build_batch_at(
        {"a": dataset}, seq_len=16, global_batch_size=4, micro_batch_size=4, data_seed=0, isolate_documents=False
    )
    with contextlib.closing(prefetch(batch_at, 0, 100, depth)) as batches:
        next(batches)
        os.truncate(tmp_path / "cut", 64)
        with pytest.raises(DataError, match=r"cut: cut short since it was opened: it ends before byte \d+") as caught:
            list(batches)
    assert any("while batch" in note for note in caught.value.__notes__)
