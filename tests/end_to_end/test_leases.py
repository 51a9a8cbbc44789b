"""Leases by fields of OpenAI's API and by headers, on real weights with few KV pages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--page-size", "16", "--num-pages", "64") as served:  # 1,024 tokens
        yield served


def ask(served: Served, prompt: str, headers: dict[str, str] | None = None, **fields: object) -> float:
    """The share of the prompt that was cached."""
    body = {"model": "default", "prompt": prompt, "max_tokens": 1, **fields}
    answer = httpx.post(served.url + "/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    share: float = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
    return share


def leased_pages(served: Served) -> int:
    lines = httpx.get(served.url + "/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("ramify_kv_pages{") and 'state="leased"' in line]
    return int(float(line.rpartition(" ")[2]))


@pytest.mark.parametrize("by", ["field", "header"])
def test_a_leased_prefix_survives_what_evicts_another(served: Served, by: str) -> None:
    httpx.post(served.url + "/flush_cache")
    leased, other = (f"{name} {by}: " + "one two three " * 90 for name in ("leased", "other"))
    options = {"prompt_cache_key": "k", "prompt_cache_retention": "24h"} if by == "field" else {}
    headers = {"x-ramify-program": "k", "x-ramify-lease": "900"} if by == "header" else {}
    ask(served, leased, headers, **options)
    ask(served, other)  # used later than the leased one
    assert leased_pages(served) > 10
    for name in ("x", "y"):
        ask(served, f"{name} {by}: " + "four five six " * 110)
    assert ask(served, leased) > 0.95
    assert ask(served, other) < 0.5
    httpx.post(served.url + "/end_program", json={"program": "k"})
    assert leased_pages(served) == 0


def test_a_lease_ends_though_its_client_never_comes_back(served: Served) -> None:
    ask(served, "Gone: " + "one two three " * 50, {"x-ramify-program": "gone", "x-ramify-lease": "0.2"})
    while leased_pages(served):  # the test's time limit ends it
        pass
