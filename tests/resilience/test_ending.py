"""Where a thread is, told from another one; and leaving a process that cannot leave by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import Future

from forge.resilience.ending import dump_stacks, place_of


def _waiting(seen, future):
    seen.append(threading.get_ident())
    future.result()


def test_the_place_is_the_innermost_frame_that_is_no_librarys(tmp_path):
    seen, future = [], Future()
    thread = threading.Thread(target=_waiting, args=(seen, future))
    thread.start()
    try:
        while not (seen and place_of(seen[0])[0].endswith("in _waiting")):
            time.sleep(0.01)
        place, collective = place_of(seen[0])
        assert place.startswith("tests/resilience/test_ending.py:") and not collective
        assert "_waiting" in dump_stacks(tmp_path / "made", also_on_stderr=False).read_text()
    finally:
        future.set_result(None)
        thread.join()
    assert place_of(seen[0]) == ("a thread that has ended", False)


def test_a_disk_that_refuses_does_not_stop_the_ending(tmp_path):
    (tmp_path / "file").write_text("")
    dump_stacks(tmp_path / "file" / "stacks", also_on_stderr=False)


STUCK = """
import threading
from forge.resilience.ending import end_process
threading.Timer(0.1, end_process, ("two\\nlines", 143)).start()
print("written", end="")
threading.Event().wait()
"""


def test_a_process_ends_from_any_thread_with_one_line_and_its_status():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "written", "error: two lines\n")
