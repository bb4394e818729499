"""A page in a headless Chromium that reaches no other machine: what it became, and what it complained of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000",
         "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # fmt: skip


def open_page(url: str, scratch: Path) -> tuple[str, list[str]]:
    """The DOM after the page's scripts ran, and the lines of its console; skips the test without a Chromium."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        assert not os.environ.get("FORGE_REQUIRE_CHROMIUM"), "FORGE_REQUIRE_CHROMIUM is set, but there is no chromium"
        pytest.skip("no chromium here: apt-get install chromium")
    done = subprocess.run(
        [binary, *FLAGS, f"--user-data-dir={scratch}/chromium", "--dump-dom", url],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    complaints = done.stderr.decode(errors="replace").splitlines()
    return done.stdout.decode(), [line for line in complaints if "CONSOLE" in line]
