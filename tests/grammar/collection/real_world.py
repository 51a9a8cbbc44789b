"""Schemas that others have published, chosen by lot: ``real_world.jsonl.xz``, one JSON object a line.

| key | meaning |
| --- | --- |
| style, name | the kind of source, and the place of the schema in it |
| source, licence | the package and version that the schema comes from, and the licence it is under |
| schema | the schema without annotations (title, description, examples, x-…), at most 100 KB |
| published | instances that come with the source, those of them that are valid |
| valid, invalid | at most 4 samples from the schema, and 8 of these with one change each |

The jsonschema package has judged every instance, with the formats of ``formats.py``. The choice: for each
source all its schemas in the order of a generator seeded with the style's name, a third of the places each
for texts under 1 KB, under 8 KB and above. Left out are schemas with references to other documents, those
that their meta-schema rejects, texts of less than 60 characters, and those with no valid instance among 80
samples. OpenAPI's ``nullable`` is written as the type null, and the types of function tools by their JSON
names. The last line has no schema: it has how many were left out for each reason, and the licences' texts.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.grammar.collection.case import Case

FILE = Path(__file__).parent / "real_world.jsonl.xz"


class RecordedCase(Case):
    """A case whose instances are in the file; `published` come with the source, in an order of their own."""

    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__(entry["style"], entry["name"], entry["schema"])
        self.source: str = entry["source"]
        self.published: list[Any] = entry["published"]
        self.instances = (self.published + entry["valid"], entry["invalid"])


def cases(file: Path = FILE) -> Iterator[RecordedCase]:
    with (lzma.open if file.suffix == ".xz" else open)(file, "rt", encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    yield from (RecordedCase(entry) for entry in entries if "schema" in entry)
