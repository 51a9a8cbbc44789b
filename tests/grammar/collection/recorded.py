"""Two collections in the form of `real_world.jsonl.xz`: schemas of a public store, and of MCP servers' tools.

``schema_store.jsonl.xz``
    Schemas of the JSON Schema Store (github.com/SchemaStore/schemastore at 3b6446ad8a07, Apache-2.0),
    without annotations. They have each keyword, form of a keyword, format, and pair of keywords that some
    schema of at most 6 KB has, and references to other documents of the store: ``definitions`` holds those by
    URI, and ``published`` instances that the store tests its schemas with.
``mcp_tools.jsonl.xz``
    The different ``inputSchema`` of 221 tools, which 15 published MCP servers list over stdio. A name is the
    server's package and the tool's name.

The jsonschema package has judged every instance, with the other documents in a registry of its own.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from tests.grammar.collection.real_world import RecordedCase

HERE = Path(__file__).parent


class ReferringCase(RecordedCase):
    """A recorded case with the schemas outside it that its own refers to."""

    def __init__(self, entry: dict[str, Any]) -> None:
        super().__init__(entry)
        self.definitions: dict[str, Any] = entry.get("definitions", {})


def _read(name: str) -> list[ReferringCase]:
    with lzma.open(HERE / name, "rt", encoding="utf-8") as lines:
        return [ReferringCase(json.loads(line)) for line in lines]


def schema_store() -> list[ReferringCase]:
    return _read("schema_store.jsonl.xz")


def mcp_tools() -> list[ReferringCase]:
    return _read("mcp_tools.jsonl.xz")
