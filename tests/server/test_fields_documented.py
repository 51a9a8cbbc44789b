"""docs/server.md names every field that an endpoint reads or refuses by name, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import CHAT, COMPLETION, GENERATE, RESPONSE

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
ENDPOINTS: dict[str, tuple[str, Any]] = {
    "Chat completions": ("/v1/chat/completions", CHAT),
    "Responses": ("/v1/responses", RESPONSE),
    "Text completions": ("/v1/completions", COMPLETION),
    "/generate": ("/generate", GENERATE),
}


def named(title: str) -> tuple[set[str], set[str]]:
    """(fields taken, fields refused) according to the section `title`."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    refused = re.search(r"^Refused.*?: ((?:`\w+`[,;.]\s*)+)", section, re.MULTILINE)
    assert rows
    assert refused
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}, set(
        re.findall(r"`(\w+)`", refused.group(1))
    )


@pytest.mark.parametrize("title", ENDPOINTS)
def test_fields(http: httpx.Client, taken: dict[str, tuple[set[str], set[str]]], title: str) -> None:
    path, body = ENDPOINTS[title]
    assert http.post(path, json=body).status_code == 200
    said, said_refused = named(title)
    if title != "/generate":
        alike, alike_refused = named("What OpenAI's endpoints take alike")
        said, said_refused = said | alike, said_refused | alike_refused
    assert taken[""] == (said, said_refused)
