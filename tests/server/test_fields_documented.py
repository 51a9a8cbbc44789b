"""docs/server.md names every field that an endpoint takes or knows to refuse, and no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.runtime.server.fields import Fields
from tests.server.fake_frontend import MODEL

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
ENDPOINTS: dict[str, tuple[str, Any]] = {
    "Chat completions": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    ),
    "Responses": ("/v1/responses", {"model": MODEL, "input": "hi"}),
    "Text completions": ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
    "/generate": ("/generate", {"text": "hi"}),
}


def named(title: str) -> tuple[set[str], set[str]]:
    """The fields that the section `title` says are taken, and those that it says are refused."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    refused = re.search(r"^Refused.*?: ((?:`\w+`[,;.]\s*)+)", section, re.MULTILINE)
    assert rows
    assert refused
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}, set(
        re.findall(r"`(\w+)`", refused.group(1))
    )


@pytest.mark.parametrize("title", ENDPOINTS)
def test_fields(http: httpx.Client, monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    path, body = ENDPOINTS[title]
    taken: set[str] = set()
    refused: set[str] = set()
    refuse_rest = Fields.refuse_rest

    def noting(fields: Fields, unsupported: Mapping[str, str] | None = None) -> None:
        if fields.path("x") == "x":  # the body itself
            taken.update(fields._taken)
            refused.update(unsupported or ())
        refuse_rest(fields, unsupported)

    monkeypatch.setattr(Fields, "refuse_rest", noting)
    assert http.post(path, json=body).status_code == 200
    said, said_refused = named(title)
    if title != "/generate":
        alike, alike_refused = named("What OpenAI's endpoints take alike")
        said, said_refused = said | alike, said_refused | alike_refused
    assert taken == said
    assert refused == said_refused
