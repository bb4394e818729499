"""A manifest comes back as it was written; anything else is refused in one line."""

from __future__ import annotations

import pytest

from forge.data import FileEntry, Manifest, read_manifest
from forge.data.manifest import MANIFEST, write_manifest
from forge.errors import DataError

MADE = Manifest(
    source="stdlib",
    tokenizer="bytes",
    vocab_size=257,
    eod_id=256,
    eval_fraction=0.02,
    files={"train.bin": FileEntry("train", 10, 2, 8, "ab"), "eval.bin": FileEntry("eval", 5, 1, 4, "cd")},
)


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    write_manifest(tmp_path, MADE)
    assert read_manifest(tmp_path) == MADE


def test_a_split_has_its_own_files():
    assert list(MADE.of("train")) == ["train.bin"] and list(MADE.of("eval")) == ["eval.bin"]


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path.name}: not a prepared folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", "null", '{"files": 3}', b"\xff\xfe"])
def test_a_damaged_manifest_is_one_line_that_names_it(tmp_path, text):
    (tmp_path / MANIFEST).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        read_manifest(tmp_path)
    assert MANIFEST in str(caught.value) and "\n" not in str(caught.value)


def test_a_manifest_with_a_number_that_is_none_is_refused(tmp_path):
    write_manifest(tmp_path, MADE)
    file = tmp_path / MANIFEST
    file.write_text(file.read_text().replace('"tokens": 10', '"tokens": "ten"'))
    with pytest.raises(DataError, match="damaged"):
        read_manifest(tmp_path)
