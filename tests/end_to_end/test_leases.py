"""Leases and pins by every way to ask for them, on real weights with few KV pages."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

import ramify as rm
from ramify.cli.main import main
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


def mark(served: Served, prompt: str) -> None:
    """Send `prompt` with Anthropic's mark, for an hour."""
    text = {"type": "text", "text": prompt, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": [text]}]}
    usage = httpx.post(served.url + "/v1/messages", json=body, timeout=120).json()["usage"]
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] + usage["cache_read_input_tokens"] > 0


def read_share(served: Served, prompt: str) -> float:
    """The share of `prompt` as a user turn that was cached."""
    body = {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
    usage = httpx.post(served.url + "/v1/messages", json=body, timeout=120).json()["usage"]
    share: float = usage["cache_read_input_tokens"] / (
        usage["cache_read_input_tokens"] + usage["input_tokens"] + usage["cache_creation_input_tokens"]
    )
    return share


def press(served: Served, by: str) -> None:
    """Send requests that need all pages together, each a third of them."""
    for name in ("x", "y", "z"):
        ask(served, f"{name} {by}: " + "four five six " * 110)


@rm.function
def write(s: rm.ProgramState, text: str) -> None:
    s += text


@rm.function
def asking(s: rm.ProgramState, text: str) -> None:
    s += text + rm.gen("answer", max_tokens=1)


@pytest.fixture
def endpoint(served: Served) -> Iterator[rm.RuntimeEndpoint]:
    httpx.post(served.url + "/flush_cache")
    backend = rm.RuntimeEndpoint(served.url)
    yield backend
    backend.close()


def test_a_mark_of_anthropic_survives_what_evicts_another(served: Served) -> None:
    httpx.post(served.url + "/flush_cache")
    marked, other = (f"{name}: " + "one two three " * 90 for name in ("marked", "other"))
    mark(served, marked)
    read_share(served, other)  # used later than the marked one
    press(served, "mark")
    assert read_share(served, marked) > 0.95
    assert read_share(served, other) < 0.5


def test_the_hint_of_a_program_holds_until_the_program_ends(
    served: Served, endpoint: rm.RuntimeEndpoint
) -> None:
    text = "A program: " + "one two three " * 90

    @rm.function
    def program(s: rm.ProgramState) -> None:
        s += text + rm.gen("first", max_tokens=1)
        assert s["first"] is not None
        press(served, "program")
        s += " And then?" + rm.gen("second", max_tokens=1)

    state = program.run(backend=endpoint)
    assert state.get_meta_info("second")["cached_tokens"] > 0.95 * len(text.split())
    while leased_pages(served):  # the end of the program is told in the background
        pass
    press(served, "later")
    assert asking.run(text, backend=endpoint).usage.cached_tokens < 100


def test_a_pin_is_shown_kept_and_released(
    served: Served, endpoint: rm.RuntimeEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "A manual: " + "one two three " * 90
    held = rm.pin(write.run(text, backend=endpoint), 600)
    press(served, "pin")
    press(served, "pin again")
    assert asking.run(text, backend=endpoint).usage.cached_tokens > 0.95 * held.tokens
    (found,) = httpx.get(served.url + "/cache").json()["models"]
    (hold,) = [one for one in found["holds"] if one["kind"] == "pin"]
    assert (hold["owner"], hold["name"], hold["tokens"]) == (held.owner, "write", held.tokens)
    assert hold["text"].endswith("one two three ")
    assert main(["top", "--once", "--url", served.url]) == 0
    assert held.owner in capsys.readouterr().out
    with pytest.raises(rm.InvalidRequest, match="pins hold"):
        rm.pin(write.run("Another: " + text, backend=endpoint))
    assert httpx.delete(f"{served.url}/cache/{held.owner}").json()["released"] == 1
    press(served, "released")
    assert asking.run(text, backend=endpoint).usage.cached_tokens < held.tokens / 2


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
