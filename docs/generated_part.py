"""Rewrites the generated part of a Markdown file, or compares it with ``--check``."""

from __future__ import annotations

import sys
from pathlib import Path


def main(path: Path, begin: str, end: str, part: str) -> int:
    """Put `part` between the marks `begin` and `end` of the file `path`, or with ``--check`` only compare.

    Returns the exit status: 1 if ``--check`` finds a different part there, else 0.
    """
    text = path.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    wanted = before + begin + part + end + after
    if "--check" in sys.argv[1:]:
        return int(text != wanted)
    path.write_text(wanted)
    return 0
