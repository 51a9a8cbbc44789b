"""Long texts, shortened for people to read."""

from __future__ import annotations


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` characters, the last one "…" where it is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"
