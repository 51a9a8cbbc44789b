"""Requests of load generators and evaluation harnesses, as recorded from guidellm 0.8.1, aiperf 0.13.0 and
lm-eval 0.4.13, with shorter prompts."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from tests.server.fake_frontend import EOS, MODEL, FakeFrontend, events

LIKELIHOOD = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
"""lm-eval's request for the likelihood of a prompt's end, without the prompt."""
MEASURED = {
    "guidellm": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "aiperf": {"stream_options": {"include_usage": True}},
}
"""By tool: fields of its streams, which have `ignore_eos` in common."""


MESSAGES = [{"role": "user", "content": "abc"}]


def ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("prompt", [[ids("abc")], [ids("abc"), ids("xy")], "abc"])
def test_likelihoods_of_lm_eval(http: httpx.Client, prompt: Any) -> None:
    """lm-eval leaves out the first tokens, of the context, and the last one, which was generated."""
    answer = http.post("/v1/completions", json=LIKELIHOOD | {"prompt": prompt}).json()
    texts = ["abc", "xy"] if len(prompt) == 2 else ["abc"]
    assert [choice["text"] for choice in answer["choices"]] == [text + text[0].upper() for text in texts]
    for text, choice in zip(texts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][:-1] == [None, *(-(ord(end) % 8) - 0.5 for end in text[1:])]
        assert logprobs["tokens"] == list(choice["text"])
        assert logprobs["text_offset"] == list(range(len(text) + 1))
        assert len(logprobs["top_logprobs"]) == len(text) + 1


def test_an_echo_of_ids_in_a_stream_of_two_choices(http: httpx.Client) -> None:
    """Special tokens among the ids are spelled."""
    body = LIKELIHOOD | {"prompt": [*ids("ab"), EOS], "n": 2, "max_tokens": 2, "logprobs": None}
    *chunks, _ = events(http.post("/v1/completions", json=body | {"stream": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ab<end>AB"] * 2


def test_the_tokenizer_for_a_client_that_has_no_files(http: httpx.Client, frontend: FakeFrontend) -> None:
    """lm-eval takes the server's tokenizer if both endpoints answer, and its end token as a stop string."""
    frontend.info = msgspec.structs.replace(frontend.info, special_tokens={"eos_token": "<end>"})
    expected = {"bos_token": None, "eos_token": "<end>", "chat_template": "", "model_max_length": 4096}
    assert http.get("/tokenizer_info").json() == http.get("/v1/tokenizer_info").json() == expected
    asked = {"prompt": "test", "add_special_tokens": False}
    assert http.post("/tokenize", json=asked).json()["tokens"] == ids("test")


@pytest.mark.parametrize("tool", MEASURED)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 3},
        ),
    ],
)
def test_streams_of_load_generators(
    http: httpx.Client, frontend: FakeFrontend, tool: str, path: str, prompt: dict[str, Any]
) -> None:
    """Both stop the clock of the first token at the first event with text, and count tokens by the usage."""
    body = {"model": MODEL, **prompt, "stream": True, "ignore_eos": True, **MEASURED[tool]}
    *chunks, last, _ = events(http.post(path, json=body))
    assert frontend.requests[-1].sampling.ignore_eos
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    texts = [
        text
        for chunk in chunks
        for choice in chunk["choices"]
        if (text := choice.get("text") or choice.get("delta", {}).get("content"))
    ]
    assert len("".join(texts)) == 3
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == ([] if tool == "aiperf" else sorted(counts))
    assert bool(counts) is (tool == "guidellm")
