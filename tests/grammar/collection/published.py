"""Schemas like published ones: configuration files, specifications, rare features of drafts.

They are data, in ``published.jsonl``: one a line, with instances written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.grammar.collection.case import Case

FILE = Path(__file__).with_suffix(".jsonl")


def cases() -> Iterator[Case]:
    with FILE.open(encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    for entry in entries:
        yield Case("published", entry["name"], entry["schema"], tuple(entry["instances"]))
