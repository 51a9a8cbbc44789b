"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ramify.runtime.server.openai.tokenize import PART_SIZE, PART_TEXTS
from tests.server.fake_frontend import EOS, MODEL, FakeFrontend

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_prompt(http: httpx.Client, prefix: str) -> None:
    answer = http.post(prefix + "/tokenize", json={"model": MODEL, "prompt": "hi"})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 105, EOS],
        "token_strs": None,
    }
    back = http.post(prefix + "/detokenize", json={"model": MODEL, "tokens": answer.json()["tokens"]})
    assert back.json() == {"prompt": "hi<end>", "text": "hi"}


def test_options(http: httpx.Client) -> None:
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    assert (answer["tokens"], answer["token_strs"], answer["count"]) == ([104, 105], ["h", "i"], 2)
    back = http.post("/detokenize", json={"tokens": [104, EOS], "skip_special_tokens": False}).json()
    assert back == {"prompt": "h<end>", "text": "h<end>"}


def test_lists(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": ["hi", ""], "add_special_tokens": False}).json()
    assert (answer["tokens"], answer["count"]) == ([[104, 105], []], [2, 0])
    back = http.post("/detokenize", json={"tokens": [[104, 105], []]}).json()
    assert back == {"prompt": ["hi", ""], "text": ["hi", ""]}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "text": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 1


def test_a_chat_has_the_tokens_of_its_completion(http: httpx.Client, frontend: FakeFrontend) -> None:
    count = http.post("/tokenize", json=CHAT).json()["count"]
    usage = http.post("/v1/chat/completions", json=CHAT | {"model": MODEL}).json()["usage"]
    assert count == usage["prompt_tokens"]
    asked, answered = frontend.requests
    assert (asked.chat, asked.tools, asked.template_kwargs) == (
        answered.chat,
        answered.tools,
        answered.template_kwargs,
    )
    http.post("/tokenize", json=CHAT | {"add_generation_prompt": False})
    assert frontend.requests[-1].template_kwargs == '{"add_generation_prompt":false}'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", CHAT | {"prompt": "hi"}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt[0]"),
        ("/tokenize", {"prompt": "hi", "model": "x"}, "model"),
        ("/tokenize", {"prompt": "hi", "messages_": []}, "messages_"),
        ("/tokenize", CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        ("/tokenize", CHAT | {"continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
        ("/detokenize", {"tokens": [EOS + 1]}, "tokens"),
        ("/detokenize", {"tokens": [[1], [-1]]}, "tokens"),
        ("/detokenize", {"tokens": "hi"}, "tokens"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_many_texts_are_asked_for_in_parts(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Many texts are split over several control calls, so that other requests get their turn in between."""
    texts = ["a"] * (PART_TEXTS + 2) + ["b" * PART_SIZE, "", "m"]
    answer = http.post("/tokenize", json={"prompt": texts, "add_special_tokens": False}).json()
    assert answer["count"] == [len(text) for text in texts]
    assert [len(call.prompts) for call in frontend.calls] == [PART_TEXTS, 3, 2]
    assert http.post("/tokenize", json={"prompt": [], "add_special_tokens": False}).json()["count"] == []
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back["text"] == back["prompt"] == texts
