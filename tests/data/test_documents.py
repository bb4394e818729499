"""Which files are documents, and on which side of the split each falls."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.documents import cut, find_documents, is_held_out, source_root
from forge.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", ".hidden/d.txt", ".e.txt", "__pycache__/f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    return tmp_path


def _names(files, root):
    return [file.relative_to(root).as_posix() for file in files]


def test_a_folder_gives_its_text_files_recursively_and_sorted(corpus):
    assert _names(find_documents(str(corpus)), corpus) == ["a.md", "b.txt", "sub/c.py"]


def test_a_file_is_itself_and_a_glob_is_what_it_matches(corpus):
    assert find_documents(str(corpus / "b.txt")) == [corpus / "b.txt"]
    assert _names(find_documents(str(corpus / "[as]*/*.*")), corpus) == ["sub/c.py"]
    assert _names(find_documents(str(corpus / "**/*.[mp]*")), corpus) == ["a.md", "image.png", "sub/c.py"]
    assert source_root(str(corpus / "**/*.*")) == corpus
    assert source_root(str(corpus / "b.txt")) == corpus


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert find_documents(str(tmp_path / "a[1].txt")) == [tmp_path / "a[1].txt"]


def test_stdlib_is_the_sources_of_this_python_without_packages_and_tests():
    root = Path(sysconfig.get_path("stdlib"))
    names = _names(find_documents("stdlib"), root)
    assert "json/decoder.py" in names and "os.py" in names and len(names) > 300
    assert names == sorted(names)
    assert not [n for n in names if {"site-packages", "test", "tests", "__pycache__"} & set(n.split("/"))]
    assert all(n.endswith(".py") for n in names)


@pytest.mark.parametrize("path", ["nowhere", "*.nothing", "sub/**/*.nothing"])
def test_no_match_is_one_error_that_names_the_path(tmp_path, path):
    with pytest.raises(DataError) as caught:
        find_documents(str(tmp_path / path))
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_text_is_an_error_that_says_so(tmp_path):
    with pytest.raises(DataError, match="no text file in this folder"):
        find_documents(str(tmp_path))


def test_files_of_records_are_taken_though_they_are_no_text(tmp_path):
    for name in ("a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet", "e.bin"):
        (tmp_path / name).write_bytes(b"\0")
    assert [file.name for file in find_documents(str(tmp_path))] == ["a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet"]


@settings(deadline=None)
@given(name=st.text(), few=st.floats(0, 0.5), more=st.floats(0, 0.5))
def test_what_a_small_share_holds_out_a_larger_one_does_too(name, few, more):
    few, more = sorted((few, more))
    assert not is_held_out(name, 0)
    assert is_held_out(name, 1)
    assert is_held_out(name, more) or not is_held_out(name, few)


def test_about_the_asked_share_is_held_out_and_a_name_that_is_no_unicode_has_its_side():
    assert 150 < sum(is_held_out(f"{i}.txt", 0.1) for i in range(2000)) < 250
    assert is_held_out("\udcff.txt", 1)


@settings(deadline=None, max_examples=30)
@given(text=st.text(min_size=2), fraction=st.floats(0.001, 0.5))
def test_a_text_is_cut_by_the_share_and_no_character_is_lost(text, fraction):
    train, held_out = cut(text, fraction)
    assert train + held_out == text and train and held_out
    assert abs(len(held_out) - fraction * len(text)) <= 1


@pytest.mark.parametrize(("text", "fraction"), [("abc", 0), ("a", 0.5), ("", 0.5)])
def test_nothing_is_cut_where_nothing_is_held_out_or_nothing_is_there(text, fraction):
    assert cut(text, fraction) == (text, "")
