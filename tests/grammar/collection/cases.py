"""Schemas with valid and invalid instances: four collections, each a file with one JSON object a line.

| key | meaning |
| --- | --- |
| style, name | the kind of source, and the place of the schema in it |
| source, licence | the package and version that the schema comes from, and the licence it is under |
| schema | the schema, at most 100 KB |
| definitions | the other documents that the schema refers to, by URI |
| published | valid instances that come with the source, in an order of their own |
| valid, invalid | samples from the schema, and samples with one change each |

The jsonschema package has judged every instance, with the formats of `oracle`, and with `definitions` in
a registry of its own. Only `schema`, `valid` and `invalid` are in all files.
"""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Case:
    """A schema, and its `instances`: the valid and the invalid ones."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.style: str = entry.get("style", "")
        self.name: str = entry["name"]
        self.source: str = entry.get("source", "")
        self.schema: Any = entry["schema"]
        self.definitions: dict[str, Any] = entry.get("definitions", {})
        self.instances: tuple[list[Any], list[Any]] = (
            entry.get("published", []) + entry["valid"],
            entry["invalid"],
        )

    def __repr__(self) -> str:
        return f"{self.style}: {self.name}"


@cache
def read(file: Path) -> list[Case]:
    with (lzma.open if file.suffix == ".xz" else open)(file, "rt", encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines]
    return [Case(entry) for entry in entries if "schema" in entry]


def written() -> list[Case]:
    """Schemas written for the tests. The style "suite" has small schemas for each keyword, like those of JSON
    Schema's test suite; the other styles have schemas like those of OpenAPI documents, Kubernetes resources,
    configuration files, analytics events and tools."""
    return read(HERE / "written.jsonl.xz")


def real_world() -> list[Case]:
    """Schemas that others have published, chosen by lot, without annotations (title, description, x-…).

    Of each source all schemas are in the order of a generator seeded with the style's name, a third of the
    places each for texts under 1 KB, under 8 KB and above. Left out are schemas with references to other
    documents, those that their meta-schema rejects, texts of less than 60 characters, and those with no valid
    instance among 80 samples. OpenAPI's ``nullable`` is written as the type null, and the types of function
    tools by their JSON names. The last line of the file has no schema: it has how many were left out for each
    reason, and the licences' texts.
    """
    return read(HERE / "real_world.jsonl.xz")


def schema_store() -> list[Case]:
    """Schemas of the JSON Schema Store (github.com/SchemaStore/schemastore at 3b6446ad8a07, Apache-2.0),
    without annotations. They have each keyword, form of a keyword, format, and pair of keywords that some
    schema of at most 6 KB has, and references to other documents of the store."""
    return read(HERE / "schema_store.jsonl.xz")


def mcp_tools() -> list[Case]:
    """The different ``inputSchema`` of 221 tools, which 15 published MCP servers list over stdio. A name is
    the server's package and the tool's name."""
    return read(HERE / "mcp_tools.jsonl.xz")
