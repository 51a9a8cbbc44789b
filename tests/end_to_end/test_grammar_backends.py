"""`ramify serve --grammar-backend xgrammar` with real weights."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.end_to_end.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"], "type": "string"}, "count": {"type": "integer"}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def body(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Choose."}],
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }


def test_an_answer_and_a_refusal() -> None:
    with serve("--grammar-backend", "xgrammar") as served, httpx.Client(timeout=120) as client:
        url = served.url + "/v1/chat/completions"
        answered = client.post(url, json=body(SCHEMA))
        assert answered.status_code == 200, answered.text
        choice = answered.json()["choices"][0]
        told = choice["ramify"]
        assert (told["grammar_backend"], told["may_be_cut"]) == ("xgrammar", True)
        assert told["narrowed"][0] == "Properties come in the schema's order."
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"color", "count"}
        refused = client.post(url, json=body(UNIQUE))
        assert refused.status_code == 400
        assert "xgrammar 0." in refused.json()["error"]["message"]
