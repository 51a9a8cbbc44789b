"""The part of a page that is written by a script: rewritten, or with ``--check`` only compared."""

from __future__ import annotations

import sys
from pathlib import Path


def main(page: Path, begin: str, end: str, part: str) -> int:
    """Put `part` between the marks `begin` and `end` of `page`; 1 where ``--check`` finds another there."""
    text = page.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    wanted = before + begin + part + end + after
    if "--check" in sys.argv[1:]:
        return int(text != wanted)
    page.write_text(wanted)
    return 0
