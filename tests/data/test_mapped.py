"""Thousands of files can be open at once, and a file that changed under the reader is named."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import TokenDataset, write_shard
from forge.data.mapped import MAPS_KEPT, map_file
from forge.data.shard import open_shard
from forge.errors import DataError


def _mapped(path, numbers):
    np.array(numbers, np.uint16).tofile(path)
    return map_file(path, np.dtype("<u2"), 0, len(numbers))


@settings(deadline=None)
@given(data=st.data(), length=st.integers(0, 20))
def test_it_reads_as_the_array_does_and_so_does_a_part(tmp_path_factory, data, length):
    mapped = _mapped(tmp_path_factory.mktemp("mapped") / "a", range(length))
    start = data.draw(st.integers(0, length))
    n = data.draw(st.integers(0, length - start))
    assert len(mapped) == length and mapped[:].tolist() == list(range(length))
    assert len(mapped.part(start, n)) == n
    assert mapped.part(start, n)[:].tolist() == mapped[start : start + n].tolist() == list(range(start, start + n))


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
        assert len(os.listdir("/proc/self/fd")) < MAPS_KEPT + 200
    finally:
        if resource_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, resource_limit)


def test_a_file_that_took_the_place_of_another_is_read_as_itself(tmp_path):
    before = _mapped(tmp_path / "a", [1, 2])
    assert before[:].tolist() == [1, 2]
    _mapped(tmp_path / "b", [3, 4])
    os.replace(tmp_path / "b", tmp_path / "a")
    assert map_file(tmp_path / "a", np.dtype("<u2"), 0, 2)[:].tolist() == [3, 4]


def test_a_file_that_was_cut_or_removed_since_is_named(tmp_path):
    gone, cut = _mapped(tmp_path / "gone", [1, 2]), _mapped(tmp_path / "cut", [1, 2])
    (tmp_path / "gone").unlink()
    (tmp_path / "cut").write_bytes(b"a")
    for mapped in (gone, cut):
        with pytest.raises(DataError, match=r"(gone|cut): gone or cut short since it was opened"):
            mapped[:1]
