"""Files of many documents give the same records from anywhere on, or say where they are damaged."""

from __future__ import annotations

import gzip
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import readers
from forge.data.readers import by_size, read_lines, read_parquet
from forge.errors import DataError

PACK = {
    "a.jsonl": bytes,
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture(autouse=True, scope="module")
def _small_runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "RUN_BYTES", 50)
        patch.setattr(readers, "ROWS_AT_ONCE", 3)
        yield


def _write(path, content):
    path.write_bytes(PACK[path.name](content))
    return path


@settings(deadline=None, max_examples=40)
@given(
    content=st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=30).map(b"\n".join),
    start=st.integers(0, 35),
    name=st.sampled_from(sorted(PACK)),
)
def test_lines_from_anywhere_on_are_the_rest_of_the_file(tmp_path_factory, content, start, name):
    file = _write(tmp_path_factory.mktemp("lines") / name, content)
    runs = list(read_lines(file, start))
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    assert [line for _, run, _ in runs for line in run] == [line for line in lines if line][start:]
    at = start
    for first, run, read in runs:
        assert first == at and run and read <= file.stat().st_size
        at += len(run)
    assert not runs or runs[-1][2] == file.stat().st_size


def test_several_packed_parts_are_one_file(tmp_path):
    for name in PACK:
        (tmp_path / name).write_bytes(PACK[name](b"a\nb") + PACK[name](b"c\n"))
        assert [line for _, run, _ in read_lines(tmp_path / name, 0) for line in run] == [b"a\n", b"bc\n"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@settings(deadline=None, max_examples=40)
@given(kept=st.floats(0.02, 0.99))
def test_a_packed_file_cut_anywhere_is_named(tmp_path_factory, name, kept):
    file = _write(tmp_path_factory.mktemp("cut") / name, b"".join(b"line %d\n" % (i * i) for i in range(500)))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(DataError, match=r"a\.jsonl\.\w+: damaged or cut short after line \d+") as caught:
        list(read_lines(file, 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_packed_file_that_is_damaged_or_none_is_named(tmp_path, name):
    file = _write(tmp_path / name, b"".join(b"line %d\n" % (i * i) for i in range(500)))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    for damaged in (content, b"no packed file at all"):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged or cut short after line"):
            list(read_lines(file, 0))


def test_a_frame_with_the_large_window_of_public_dumps_can_be_read(tmp_path):
    packer = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=28))
    frame = packer.compressobj()  # of unknown size, so that the window is the stated one
    (tmp_path / "a.zst").write_bytes(frame.compress(b"x\n") + frame.flush())
    assert [run for _, run, _ in read_lines(tmp_path / "a.zst", 0)] == [[b"x\n"]]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match="gone: cannot be read"):
        list(read_lines(tmp_path / "gone", 0))


def _table(file, values, rows_a_group=4):
    pyarrow.parquet.write_table(
        pyarrow.table({"id": list(range(len(values))), "text": pyarrow.array(values, pyarrow.string())}),
        file,
        row_group_size=rows_a_group,
    )
    return file


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.text(max_size=30) | st.none(), max_size=20), start=st.integers(0, 25), group=st.integers(1, 6)
)
def test_rows_from_anywhere_on_are_the_rest_of_the_column(tmp_path_factory, values, start, group):
    values = [value and value.encode(errors="replace").decode() for value in values]
    file = _table(tmp_path_factory.mktemp("rows") / "a.parquet", values, group)
    runs = list(read_parquet(file, "text", start))
    assert [value for _, run, _ in runs for value in run] == values[start:]
    at = start
    for first, run, share in runs:
        assert first == at and run and share == (first + len(run)) / len(values)
        at += len(run)


def test_a_parquet_file_without_the_column_is_named_with_what_it_has(tmp_path):
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body' \(it has: id, text\)"):
        list(read_parquet(_table(tmp_path / "a.parquet", ["x"]), "body", 0))


def test_a_parquet_file_that_is_cut_or_none_is_named(tmp_path):
    file = _table(tmp_path / "a.parquet", [f"text {i * i}" for i in range(100)])
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"nothing of the kind"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file, or damaged") as caught:
            list(read_parquet(file, "text", 0))
        assert "\n" not in str(caught.value)


def test_a_parquet_file_damaged_inside_is_named_with_the_row(tmp_path):
    file = _table(tmp_path / "a.parquet", [f"text {i * i}" * 20 for i in range(100)], 50)
    content = bytearray(file.read_bytes())
    middle = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(1).data_page_offset
    content[middle : middle + 200] = b"\xff" * 200
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet: damaged after row \d+ ") as caught:
        list(read_parquet(file, "text", 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("module", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow.parquet", "a.parquet")])
def test_a_missing_package_is_one_line_that_says_how_to_have_it(tmp_path, monkeypatch, module, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(DataError, match=rf"{name}: reading it needs the package {package}: pip install {package}"):
        list(read_parquet(tmp_path / name, "text", 0) if name == "a.parquet" else read_lines(tmp_path / name, 0))


@settings(deadline=None)
@given(values=st.lists(st.text(max_size=60) | st.none()), first=st.integers(0, 9))
def test_runs_by_size_lose_nothing_and_are_no_larger_than_they_must(values, first):
    runs = list(by_size(first, values))
    assert [value for _, run in runs for value in run] == values
    for at, run in runs:
        assert at == first and sum(len(value or "") for value in run[:-1]) < 50
        first += len(run)
