"""Which files are documents, and on which side of the split each falls."""

from __future__ import annotations

import logging
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.documents import Document, find_documents, readable_documents, source_root, split_documents
from forge.errors import DataError

ROOT = Path("/corpus")


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


def test_a_file_that_is_not_utf8_is_left_out_with_one_warning_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    (tmp_path / "good.txt").write_text("é")
    (tmp_path / "empty.txt").write_text("")
    warnings = []
    monkeypatch.setattr(logging.getLogger("forge.data.documents"), "handle", warnings.append)
    documents = readable_documents(find_documents(str(tmp_path)))
    assert [(d.path.name, d.n_bytes, d.text()) for d in documents] == [("good.txt", 2, "é")]
    assert ["bad.txt" in record.getMessage() for record in warnings] == [True]


def test_a_file_that_changes_while_it_is_prepared_is_named(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("x")
    (document,) = readable_documents([file])
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"a\.txt: changed"):
        document.text()
    file.unlink()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read"):
        document.text()


@settings(deadline=None)
@given(
    names=st.lists(st.text("abcdef", min_size=1), min_size=2, max_size=30, unique=True), fraction=st.floats(0.001, 0.5)
)
def test_every_document_is_on_one_side_and_both_sides_have_one(names, fraction):
    documents = [Document(ROOT / name, 1) for name in names]
    train, held = split_documents(documents, ROOT, fraction)
    assert sorted(d.path for d in train + held) == sorted(d.path for d in documents)
    assert train and held


@settings(deadline=None)
@given(names=st.lists(st.text("abcdef", min_size=1), min_size=2, max_size=30, unique=True), data=st.data())
def test_the_split_depends_neither_on_the_order_nor_on_where_the_corpus_lies(names, data):
    moved = data.draw(st.permutations(names))
    _, held = split_documents([Document(ROOT / name, 1) for name in names], ROOT, 0.3)
    _, there = split_documents([Document(Path("/other/disk") / name, 1) for name in moved], Path("/other/disk"), 0.3)
    assert {d.path.name for d in held} == {d.path.name for d in there}


def test_a_document_stays_on_its_side_when_others_join():
    documents = [Document(ROOT / str(i), 1) for i in range(2000)]
    _, some = split_documents(documents[:1000], ROOT, 0.1)
    _, all_held = split_documents(documents, ROOT, 0.1)
    assert {d.path for d in some} == {d.path for d in all_held} & {d.path for d in documents[:1000]}
    assert 150 < len(all_held) < 250


def test_no_held_out_share_holds_nothing_out():
    documents = [Document(ROOT / str(i), 1) for i in range(3)]
    assert split_documents(documents, ROOT, 0) == (documents, [])


@settings(deadline=None, max_examples=30)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=2), fraction=st.floats(0.001, 0.5))
def test_a_single_document_is_cut_and_no_character_is_lost(tmp_path_factory, text, fraction):
    file = tmp_path_factory.mktemp("one") / "a.txt"
    file.write_bytes(text.encode())
    (train,), (held,) = split_documents(readable_documents([file]), file.parent, fraction)
    assert train.text() + held.text() == text and train.text() and held.text()
    assert train.n_bytes == len(train.text().encode()) and held.n_bytes == len(held.text().encode())
    assert abs(len(held.text()) - fraction * len(text)) <= 1
