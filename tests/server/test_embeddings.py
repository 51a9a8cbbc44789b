"""POST /v1/embeddings, as the openai package calls it."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest

from tests.server.conftest import refused
from tests.server.fake_frontend import MODEL, FakeFrontend


def test_one_and_many(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    found = client.embeddings.create(model=MODEL, input=["abcd", "b"], encoding_format="float")
    raw = np.array([4, *b"abc"], float)
    assert found.data[0].embedding == pytest.approx((raw / np.linalg.norm(raw)).tolist())
    assert [one.index for one in found.data] == [0, 1]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (5, 5)
    # The package asks for base64 by itself, and reads it.
    same = client.embeddings.create(model=MODEL, input=[[97, 98, 99, 100]], dimensions=2)
    assert same.data[0].embedding == pytest.approx((raw[:2] / np.linalg.norm(raw[:2])).tolist())
    assert [request.pooling for request in frontend.requests] == ["last"] * 3
    assert all(request.sampling.max_tokens == 0 for request in frontend.requests)


def test_own_options(http: httpx.Client, frontend: FakeFrontend) -> None:
    body = {
        "model": MODEL,
        "input": "abc",
        "pooling": "mean",
        "normalize": False,
        "encoding_format": "base64",
    }
    answer = http.post("/v1/embeddings", json=body).json()
    raw = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert raw.tolist() == [3, *b"abc"]
    assert frontend.requests[0].pooling == "mean"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"dimensions": 5}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"stream": True}, "stream"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_refused_by_name(http: httpx.Client, fields: dict[str, object], named: str) -> None:
    answer = http.post("/v1/embeddings", json={"model": MODEL, "input": "abc", **fields})
    assert refused(answer)["param"] == named
