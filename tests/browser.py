"""Web pages in a headless browser, if one is installed."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs chromium, chromium-browser or google-chrome"
)


def rendered(address: str, *, profile: Path, size: tuple[int, int] = (1280, 900)) -> str:
    """The document up to its first script, after the scripts have run for 2 s of virtual time. `size`: width
    and height of the window in pixels."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=2000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return re.split(r"<script\b", done.stdout)[0]


def words(document: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", document))
