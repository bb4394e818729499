"""A work folder has one holder; what it notes is read again, and what it leaves does not lie about."""

from __future__ import annotations

import os
import threading

import pytest

from forge.data.manifest import FileEntry
from forge.data.work import Journal, work_folder
from forge.data.writer import Partial

JOURNAL = Journal(
    recipe="a",
    source="b",
    place=(3, 4),
    files={"train-00000.bin": FileEntry("train", 5, 1, 4, "cd")},
    partials={"eval": Partial(9, 8, 3, "ef")},
)


def test_a_folder_gets_its_name_and_nothing_else_is_left(tmp_path):
    with work_folder(tmp_path / "deep" / "out") as work:
        work.restart()
        (work.folder / "a").write_text("x")
        work.write_journal(JOURNAL)
        work.publish()
    assert os.listdir(tmp_path / "deep") == ["out"] and os.listdir(tmp_path / "deep" / "out") == ["a"]


def test_work_without_a_note_is_forgotten_and_work_with_one_is_kept(tmp_path):
    for noted in (False, True):
        with pytest.raises(KeyboardInterrupt), work_folder(tmp_path / "out") as work:
            assert work.read_journal() is None
            work.restart()
            (work.folder / "a").write_text("x")
            if noted:
                work.write_journal(JOURNAL)
            raise KeyboardInterrupt
        assert os.listdir(tmp_path) == ([".out.work"] if noted else [])
    with work_folder(tmp_path / "out") as work:
        assert work.read_journal() == JOURNAL and os.listdir(work.folder) == ["a"]
        work.restart()
        assert work.read_journal() is None and os.listdir(work.folder) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b"\xff", b"null", b'{"recipe": 3}'])
def test_a_damaged_note_is_none(tmp_path, content):
    with work_folder(tmp_path / "out") as work:
        work.restart()
        (work.path / "progress.json").write_bytes(content)
        assert work.read_journal() is None


def test_the_second_waits_until_the_first_is_done(tmp_path):
    order, inside = [], threading.Event()

    def second():
        inside.wait(10)
        with work_folder(tmp_path / "out"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with work_folder(tmp_path / "out"):
        inside.set()
        thread.join(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and os.listdir(tmp_path) == []


def test_many_that_come_and_go_are_never_inside_together(tmp_path):
    inside, seen = [], []

    def come_and_go():
        for _ in range(20):
            with work_folder(tmp_path / "out") as work:
                inside.append(1)
                seen.append(len(inside))
                work.restart()
                inside.pop()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [1] * 80 and os.listdir(tmp_path) == []
