"""Records give their documents, or one line that names file and line or row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.data.documents import Document
from forge.data.records import JsonLines, Rows, TextFiles
from forge.errors import DataError


def _lines(*lines, key="text", first=0):
    return list(JsonLines(Path("/c/a.jsonl"), "a.jsonl", first, lines, key).documents(pytest.fail))


@settings(deadline=None)
@given(texts=st.lists(st.text()), first=st.integers(0, 99))
def test_a_line_is_a_document_named_by_its_number(texts, first):
    lines = [json.dumps({"id": 3, "text": text}).encode() + b"\n" for text in texts]
    expected = [Document(f"a.jsonl#{first + i}", text) for i, text in enumerate(texts)]
    assert _lines(*lines, first=first) == expected


def test_blank_lines_hold_nothing_but_count():
    assert _lines(b"\n", b' {"text": "a"} \r\n', b"  ", b'{"text": ""}') == [
        Document("a.jsonl#1", "a"),
        Document("a.jsonl#3", ""),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "line 8: not JSON (Expecting ',' delimiter, column 13)"),
        (b"\xff", "line 8: not UTF-8 (byte 0 of the line)"),
        (b"[" * 100_000, "line 8: not JSON that can be read"),
        (b"9" * 5000, "line 8: not JSON that can be read"),
        (b'["a"]', "line 8: a list where a JSON object is wanted"),
        (b"null", "line 8: null where a JSON object is wanted"),
        (b'{"body": "a", "id": 1}', "line 8: no key 'text' (it has: body, id); name the one of the text by text_key"),
        (b"{}", "line 8: no key 'text' (it has: none)"),
        (b'{"text": null}', "line 8: 'text' is null, not text"),
        (b'{"text": 3}', "line 8: 'text' is a number, not text"),
        (b'{"text": ["a"]}', "line 8: 'text' is a list, not text"),
    ],
)
def test_a_line_that_is_no_document_is_named(line, message):
    with pytest.raises(DataError) as caught:
        _lines(b'{"text": "fine"}', line, first=6)
    assert str(caught.value).startswith(f"/c/a.jsonl: {message}") and "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.binary(max_size=30))
def test_no_line_gives_another_error(line):
    try:
        _lines(line)
    except DataError as error:
        assert "/c/a.jsonl: line 1: " in str(error)


def test_rows_are_documents_named_by_their_number_and_one_that_is_no_text_is_named():
    assert list(Rows("/c/a.parquet", "a.parquet", 5, ("x", ""), "body").documents(pytest.fail)) == [
        Document("a.parquet#5", "x"),
        Document("a.parquet#6", ""),
    ]
    for value, kind in ((None, "null"), (b"x", "of type bytes"), (1.5, "a number"), (True, "a truth value")):
        with pytest.raises(DataError, match=rf"/c/a\.parquet: row 7: 'body' is {kind}, not text"):
            list(Rows("/c/a.parquet", "a.parquet", 5, ("x", value), "body").documents(pytest.fail))


def test_text_files_are_documents_and_those_that_are_not_utf8_are_named_and_left_out(tmp_path):
    (tmp_path / "a").write_text("é")
    (tmp_path / "b").write_bytes(b"abc\xff")
    left_out = []
    records = TextFiles((("a", tmp_path / "a"), ("b", tmp_path / "b"), ("a2", tmp_path / "a")))
    assert list(records.documents(left_out.append)) == [Document("a", "é"), Document("a2", "é")]
    assert left_out == [f"{tmp_path / 'b'}: not UTF-8 (byte 3), left out"]
    with pytest.raises(DataError, match="gone: cannot be read"):
        list(TextFiles((("gone", tmp_path / "gone"),)).documents(left_out.append))
