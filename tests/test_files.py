"""A file is on the disk whole or not at all."""

from __future__ import annotations

import hashlib

import pytest

from forge.files import file_digest, parse_json, replace_file, step_lines, sync_file, sync_folder


def test_new_content_takes_the_place_of_the_old_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "file"
    for content in (b"old", b"newer", b""):
        replace_file(path, content)
        assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_replaced_stays(tmp_path):
    replace_file(tmp_path / "file", b"old")
    (tmp_path / ".rewritten").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_file_that_cannot_take_its_place_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "folder", b"new")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_syncing_changes_nothing_and_needs_something_to_sync(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    sync_file(tmp_path / "file")
    sync_folder(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"content"
    for sync in (sync_file, sync_folder):
        with pytest.raises(FileNotFoundError):
            sync(tmp_path / "none")


def test_the_digest_is_that_of_the_content(tmp_path):
    (tmp_path / "file").write_bytes(b"content" * 100_000)
    assert file_digest(tmp_path / "file") == hashlib.sha256(b"content" * 100_000).hexdigest()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff", '"a\nb"'])
def test_what_is_no_json_is_a_value_error_however_deep(text):
    with pytest.raises(ValueError):
        parse_json(text)
    assert parse_json('{"a": [1, "a\nb"]}', strict=False) == {"a": [1, "a\nb"]}


def test_whole_lines_of_steps_are_read_and_what_a_kill_left_of_others_is_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1, "a": 2}\n{"step": 2, "a\n[3]\n{"a": 4}\n\xff\n\n{"step": 5}\n{"step": 6, "a": ')
    assert list(step_lines(path)) == [(1, {"step": 1, "a": 2}), (5, {"step": 5})]
    with pytest.raises(FileNotFoundError):
        list(step_lines(tmp_path / "none"))
