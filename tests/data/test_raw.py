"""Token files of others are read as they are, with their held-out part, or it is said what they seem to be instead."""

from __future__ import annotations

import time

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import DataConfig
from forge.data import (
    ByteTokenizer,
    FileEntry,
    Manifest,
    build_batch_at,
    open_dataset,
    prepare,
    prepared,
    read_manifest,
    write_shard,
)
from forge.data.manifest import write_manifest
from forge.data.raw import digest, find_token_files
from forge.data.shard import HEADER_BYTES, header, open_raw
from forge.errors import DataError

BYTES = ByteTokenizer()


def _tokens(folder, split) -> list[int]:
    dataset = open_dataset(folder, split)
    return dataset.read(0, dataset.n_tokens).tolist()


def _write(path, tokens, dtype=np.uint16):
    array = np.array(tokens, dtype)
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)
    return path


def _prepared(path, tmp_path, **changes):
    return prepared(evolve(DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), eval_fraction=0.2), **changes))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_file_of_nanogpt_has_its_held_out_part_beside_it(corpus, tmp_path, dtype):
    train, held_out = list(range(200)) * 10, list(range(40))
    _write(corpus / "val.bin", held_out, dtype)
    folder = _prepared(_write(corpus / "train.bin", train, dtype), tmp_path, raw_dtype=np.dtype(dtype).name)
    assert (_tokens(folder, "train"), _tokens(folder, "eval")) == (train, held_out)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert read_manifest(folder).files["train-00000"].file == str(corpus / "train.bin")
    assert open_dataset(folder, "train").eod_id == 256 and open_dataset(folder, "train").bytes_per_token == 0


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8", ">u2", ">i8"])
def test_an_npy_file_says_itself_what_it_holds(corpus, tmp_path, dtype):
    _write(corpus / "a.npy", range(10, 20), dtype)
    _write(corpus / "b.npy", [[1, 2, 3], [4, 5, 6]], dtype)
    folder = _prepared(corpus, tmp_path, eval_fraction=0.0)
    assert _tokens(folder, "train") == [*range(10, 20), 1, 2, 3, 4, 5, 6]


def test_a_folder_a_glob_and_a_file_are_what_they_say(corpus, tmp_path):
    for name in ("b_train_0.bin", "a_train_1.bin", "x_val_0.bin", "evaluation.bin", "interval.bin"):
        _write(corpus / name, [len(name)] * 4)
    folder = _prepared(corpus, tmp_path)
    assert _tokens(folder, "train") == [13] * 4 * 2 + [14] * 4 + [12] * 4 and _tokens(folder, "eval") == [11] * 4
    assert _tokens(_prepared(corpus / "*_0.bin", tmp_path), "train") == [13] * 4
    assert find_token_files(str(corpus / "b_train_0.bin")) == [corpus / "b_train_0.bin"]


def test_a_file_beside_is_held_out_only_of_a_single_file_and_only_where_something_is(corpus, tmp_path):
    _write(corpus / "train.bin", range(100))
    _write(corpus / "val.bin", [7] * 9)
    assert _tokens(_prepared(corpus / "train.bin", tmp_path), "eval") == [7] * 9
    with pytest.raises(DataError, match="holds no eval data"):
        open_dataset(_prepared(corpus / "train.bin", tmp_path, eval_fraction=0.0), "eval")
    assert _tokens(_prepared(corpus / "val.bin", tmp_path), "train") == [7] * 7


@settings(deadline=None, max_examples=60)
@given(
    files=st.lists(st.lists(st.sampled_from([1, 2, 3, 256]), min_size=1, max_size=30), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.5),
)
def test_without_a_held_out_file_the_end_of_the_stream_is_and_no_token_is_lost(tmp_path_factory, files, fraction):
    tmp_path = tmp_path_factory.mktemp("tail")
    for index, tokens in enumerate(files):
        _write(tmp_path / f"{index}.bin", tokens)
    folder = _prepared(tmp_path, tmp_path, eval_fraction=fraction)
    stream = [token for tokens in files for token in tokens]
    splits = {entry.split for entry in read_manifest(folder).files.values()}
    train = _tokens(folder, "train") if "train" in splits else []
    held_out = _tokens(folder, "eval")
    wanted = max(1, round(len(stream) * fraction))
    assert train + held_out == stream and (wanted + 1) // 2 <= len(held_out) <= wanted


def test_the_held_out_end_begins_after_the_end_of_a_document_where_one_is_near(corpus, tmp_path):
    _write(corpus / "train.bin", [1] * 83 + [256] + [2] * 16)
    assert _tokens(_prepared(corpus / "train.bin", tmp_path), "eval") == [2] * 16
    _write(corpus / "train.bin", [1] * 95 + [256] + [2] * 4)
    assert len(_tokens(_prepared(corpus / "train.bin", tmp_path), "eval")) == 20


def test_files_of_forge_without_their_manifest_are_read_too(corpus, tmp_path):
    write_shard(corpus / "train.bin", [np.arange(50)], vocab_size=257, eod_id=256, n_bytes=50)
    folder = _prepared(corpus / "train.bin", tmp_path, eval_fraction=0.0)
    assert _tokens(folder, "train") == [*range(50), 256]
    assert open_dataset(folder, "train").bytes_per_token == 50 / 51
    write_shard(corpus / "train.bin", [np.arange(50)], vocab_size=300, eod_id=299)
    with pytest.raises(DataError, match=r"train\.bin: tokens of a vocabulary of 300 whose documents end with 299"):
        _prepared(corpus / "train.bin", tmp_path)


def test_a_cached_description_is_made_again_once_a_file_changes(corpus, tmp_path):
    first = _prepared(_write(corpus / "train.bin", range(100)), tmp_path)
    assert _prepared(corpus / "train.bin", tmp_path) == first
    assert _prepared(_write(corpus / "train.bin", range(50)), tmp_path) != first
    assert _prepared(_write(corpus / "train.bin", range(100)), tmp_path, eval_fraction=0.1) != first


def test_prepare_describes_token_files_where_they_are(corpus, tmp_path):
    _write(corpus / "train.bin", range(100))
    manifest = prepare(str(corpus), tmp_path / "out", BYTES, eval_fraction=0.25)
    assert (manifest.files["train-00000"].tokens, manifest.files["eval-00000"].start) == (75, 75)
    (corpus / "train.bin").write_bytes(b"ab" * 50)
    with pytest.raises(DataError, match=r"train\.bin: 50 tokens where the manifest says 75"):
        open_dataset(tmp_path / "out", "train")
    (corpus / "train.bin").unlink()
    with pytest.raises(DataError, match=r"train\.bin: no such token file"):
        open_dataset(tmp_path / "out", "train")


def test_32_bit_tokens_stated_as_16_are_noticed(corpus, tmp_path):
    _write(corpus / "train.bin", list(range(200)) * 9, np.uint32)
    with pytest.raises(DataError, match=r"train\.bin: every second 16-bit token is 0: .* set raw_dtype to uint32"):
        _prepared(corpus / "train.bin", tmp_path)
    assert len(_tokens(_prepared(corpus / "train.bin", tmp_path, raw_dtype="uint32"), "train")) == 1440


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", "the file is empty"),
        ("a.bin", b"abc", "3 bytes are no whole number of uint16 tokens"),
        ("a.bin", np.array([3, 999], np.uint16).tobytes(), "the token at offset 1 has id 999, beyond the vocabulary"),
        ("a.npy", b"", "the file is empty"),
        ("a.npy", b"no numpy file", "not a .npy file, or its header is damaged"),
        ("a.npy", b"\x93NUMPY\x01\x00\xff", "not a .npy file, or its header is damaged"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(corpus, tmp_path, name, content, message):
    (corpus / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        _prepared(corpus, tmp_path)
    assert f"{corpus / name}: {message}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("array", [np.array([1.5]), np.array(3), np.array([], np.uint16), np.array([1], np.uint8),
                                   np.array(["a"]), np.ones((2, 2), np.uint16, order="F")])  # fmt: skip
def test_an_npy_file_that_is_no_row_of_tokens_is_named(corpus, tmp_path, array):
    np.save(corpus / "a.npy", array)
    if array.shape == ():
        assert _tokens(_prepared(corpus, tmp_path, eval_fraction=0.0), "train") == [3]
        return
    with pytest.raises(DataError, match=r"a\.npy: an array of .* is no row of tokens"):
        _prepared(corpus, tmp_path)


def test_an_npy_file_that_is_cut_or_would_run_code_or_has_negative_ids_is_refused(corpus, tmp_path):
    np.save(corpus / "a.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy: an array of object"):
        _prepared(corpus, tmp_path)
    _write(corpus / "a.npy", [5, -1, 3], np.int64)
    with pytest.raises(DataError, match=r"a\.npy: the token at offset 1 has id -1"):
        _prepared(corpus, tmp_path)
    (corpus / "a.npy").write_bytes((corpus / "a.npy").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"a\.npy: \d+ bytes where its header promises \d+: cut short"):
        _prepared(corpus, tmp_path)


def test_tokens_beside_text_are_refused_until_it_is_said_which_are_meant(corpus, tmp_path):
    _write(corpus / "train.bin", [*range(250)])
    (corpus / "readme.txt").write_text("what this is")
    (corpus / "meta.pkl").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"holds tokens \(train\.bin\) and text \(readme\.txt\); name .*corpus/\*\.bin"):
        _prepared(corpus, tmp_path)
    assert len(_tokens(_prepared(corpus / "*.bin", tmp_path, eval_fraction=0.0), "train")) == 250
    (corpus / "deep").mkdir()
    (corpus / "readme.txt").rename(corpus / "deep" / "readme.txt")
    with pytest.raises(DataError, match=r"holds tokens \(train\.bin\) and text \(readme\.txt\)"):
        _prepared(corpus, tmp_path)
    (corpus / "deep" / "readme.txt").unlink()
    assert find_token_files(str(corpus)) == [corpus / "train.bin"]
    assert find_token_files(str(corpus / "*")) == [] == find_token_files("stdlib")


def test_a_hundred_billion_tokens_in_a_thousand_files_open_in_seconds_and_give_a_batch(tmp_path):
    entries = {}
    for index in range(1000):
        name = f"train-{index:05d}.bin"
        with (tmp_path / name).open("wb") as file:
            file.write(header(257, 256, 100_000_000, 0, 0))
            file.truncate(HEADER_BYTES + 200_000_000)
        entries[name] = FileEntry("train", 100_000_000, 0, 0, "")
    write_manifest(tmp_path, Manifest("", "bytes", 257, 256, 0.0, entries))
    start = time.perf_counter()
    dataset = open_dataset(tmp_path, "train")
    batch_at = build_batch_at(
        {"": dataset},
        None,
        seq_len=64,
        global_batch_size=512,
        micro_batch_size=512,
        data_seed=0,
        isolate_documents=False,
    )
    assert batch_at(9).input_ids.shape == (1, 512, 64) and dataset.n_tokens == 100_000_000_000
    assert time.perf_counter() - start < 20


def test_the_digest_of_a_large_file_covers_its_length_and_blocks_from_the_first_to_the_last(tmp_path):
    tokens = np.arange(2_000_000, dtype=np.uint32).astype(np.uint16) % 250

    def of(changed) -> str:
        _write(tmp_path / "a.bin", changed)
        return digest(open_raw(tmp_path / "a.bin", "uint16", 257, 256))

    before = of(tokens)
    assert of(tokens) == before != of(tokens[:-1])
    for place in (0, len(tokens) - 1):
        changed = tokens.copy()
        changed[place] = 251
        assert of(changed) != before
