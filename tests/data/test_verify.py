"""Damage of a token file is found and named, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data import ByteTokenizer, prepare, verify
from forge.data.verify import damaged
from forge.errors import DataError


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("sound")
    (tmp_path / "text").mkdir()
    for n in range(6):
        (tmp_path / "text" / f"{n}.txt").write_text(f"document {n} " * 9)
    prepare(str(tmp_path / "text"), tmp_path / "out", ByteTokenizer(), eval_fraction=0.2, shard_tokens=200)
    return tmp_path / "out"


def test_a_sound_folder_gives_its_manifest_and_counts_its_files(sound):
    seen = []
    manifest = verify(sound, progress=lambda *done: seen.append(done))
    n = len(manifest.files)
    assert n > 3 and seen == [(i, n) for i in range(1, n + 1)]
    assert damaged(sound, manifest.files) is None


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_changed_byte_is_found_and_its_file_named(sound, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("copy")
    for file in sound.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = verify(folder)
    name = data.draw(st.sampled_from(sorted(manifest.files)))
    content = bytearray((folder / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        verify(folder)
    assert [other for other in manifest.files if other in str(caught.value)] == [name]
    assert damaged(folder, manifest.files) == name


def test_all_faults_are_named_in_one_line(sound, tmp_path):
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "train-00000.bin").unlink()
    (tmp_path / "train-00001.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"train-00000\.bin: no such token file; .*train-00001\.bin: the file is empty"
    ) as caught:
        verify(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_elsewhere_are_compared_by_their_digest_and_all_their_ids_are_checked(tmp_path):
    tokens = np.arange(2_000_000, dtype=np.uint32).astype(np.uint16) % 250
    tokens.tofile(tmp_path / "train.bin")
    prepare(str(tmp_path / "train.bin"), tmp_path / "out", ByteTokenizer(), eval_fraction=0.1)
    verify(tmp_path / "out")
    for place, value, message in ((0, 77, "its checksum is not"), (50_000, 999, "at offset 50000 has id 999")):
        changed = tokens.copy()
        changed[place] = value
        changed.tofile(tmp_path / "train.bin")
        with pytest.raises(DataError, match=rf"train\.bin: .*{message}"):
            verify(tmp_path / "out")
