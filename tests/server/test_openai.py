"""The OpenAI surface, driven by the official client over a real socket."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from ramify.messages import TokenLogprobs
from ramify.runtime.server.openai.bodies import completion_logprobs
from tests.server.conftest import BODIES
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer, events

USER: Any = [{"role": "user", "content": "hello world"}]


def test_models(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=8)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "LO WORLD")
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hello world")
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_chat_content_as_parts_and_developer_role(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        max_tokens=1,
    )
    (request,) = frontend.requests
    assert request.chat is not None
    assert [(turn.role, turn.content) for turn in request.chat] == [("system", "be brief"), ("user", "ab")]


def test_an_answer_can_be_sent_back_as_a_message(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=3)
    turn = answer.choices[0].message.model_dump()
    assert turn["tool_calls"] is None  # the client fills in nulls, which ask for nothing
    client.chat.completions.create(model=MODEL, messages=[*USER, turn, *USER], max_tokens=1)
    assert [turn.role for turn in frontend.requests[-1].chat or ()] == ["user", "assistant", "user"]


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "LO WORLD"
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_stream_on_the_wire(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_sends_whole_characters(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=20, stream=True)
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == "X … … … … "
    assert "\ufffd" not in "".join(texts)


def test_usage_says_what_was_cached(client: openai.OpenAI) -> None:
    def ask() -> Any:
        return client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1).usage

    assert ask().prompt_tokens_details.cached_tokens == 0
    again = ask()
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    assert again.ramify["computed_tokens"] == 1
    assert again.ramify["forced_tokens"] == 0


def test_cache_salt_keeps_scopes_apart(client: openai.OpenAI) -> None:
    for salt in ("a", "b"):
        answer = client.chat.completions.create(
            model=MODEL, messages=USER, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_n_choices_have_their_own_seeds_and_share_the_prompt(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 12, "n": 3, "seed": 40}
    expected = [f"LO WORLD({seed})" for seed in (40, 41, 42)]
    answer = client.chat.completions.create(**options)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(expected))
    texts, finishes, usage = ["", "", ""], [None] * 3, None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    assert (texts, finishes) == (expected, ["length"] * 3)
    for found in (answer.usage, usage):
        assert found is not None
        assert (found.prompt_tokens, found.completion_tokens) == (len("<user>hello world"), 36)


@pytest.mark.parametrize("stop", ["WOR", ["zzz", "WOR"]])
def test_stop(client: openai.OpenAI, stop: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=8, stop=stop)
    choice: Any = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.matched_stop) == ("LO ", "stop", "WOR")


def test_sampling_options_arrive(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": -100},
        seed=3,
        stop=["a"],
        extra_body={
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [5],
            "skip_special_tokens": False,
        },
    )
    sampling = frontend.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, {65: -100})
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("a",), (5,), True)
    assert sampling.skip_special_tokens is False


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_who_asks_is_logged(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, path: str, field: str
) -> None:
    with caplog.at_level("INFO", "ramify.server"):
        assert http.post(path, json=BODIES[path] | {field: "somebody"}).status_code == 200
    assert f"endpoint={path}" in caplog.text
    assert "user='somebody'" in caplog.text


def test_a_prompt_cache_key_keeps_nobody_apart(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    """There is one cache. Requests with equal prefixes share it, whatever their keys."""
    for key in ("one", "two"):
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1, prompt_cache_key=key)
    assert [request.scope for request in frontend.requests] == ["", ""]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    def check(logprobs: Any) -> None:
        assert [entry.token for entry in logprobs.content] == ["L", "O"]
        entry = logprobs.content[0]
        assert (entry.logprob, entry.bytes) == (-(ord("L") % 8) - 0.5, [ord("L")])
        assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("a", -0.25), ("b", -0.5)]

    options: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 2, "logprobs": True}
    check(client.chat.completions.create(**options, top_logprobs=2).choices[0].logprobs)
    without_top = client.chat.completions.create(**options).choices[0].logprobs
    assert without_top.content[0].top_logprobs == []
    entries = []
    for chunk in client.chat.completions.create(**options, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            entries += chunk.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["L", "O"]


def test_a_part_of_a_character_has_its_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "…"}], max_tokens=9, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content[-3:]] == [[0xE2], [0x80], [0xA6]]


class Pair(BaseModel):
    zeta: int
    alpha: str


def test_parse_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Pair)
    assert answer.choices[0].message.parsed == Pair(zeta=7, alpha="s")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello world", max_tokens=8)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "LO WORLD")
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_generates_sixteen_tokens_when_not_told(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    client.completions.create(model=MODEL, prompt="hello")
    assert frontend.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["abc", "xyz"], ["ABC", "XYZ"]),
        ([104, 105], ["HI "]),
        ([[97, 98, 99], [120, 121, 122]], ["ABC", "XYZ"]),
    ],
)
def test_completion_prompts(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts))
    streamed = [""] * len(texts)
    for chunk in client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_completion_of_several_prompts_with_n(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["abc", "xyz"], max_tokens=6, n=2, seed=1)
    assert [choice.text for choice in answer.choices] == ["ABC(1)", "ABC(2)", "XYZ(1)", "XYZ(2)"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 24)


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["A", "B"], [0, 1])
    assert logprobs.token_logprobs == [-(ord("A") % 8) - 0.5, -(ord("B") % 8) - 0.5]
    # The chosen token is among the top ones even where it is not one of the two likeliest.
    assert logprobs.top_logprobs == [{"a": -0.25, "b": -0.5, "A": -1.5}, {"a": -0.25, "b": -0.5, "B": -2.5}]


def test_text_offsets_and_keys_of_tokens_within_characters(
    client: openai.OpenAI, frontend: FakeFrontend
) -> None:
    """Each token of the fake model is one byte."""
    asked: Any = {"model": MODEL, "prompt": "é…", "max_tokens": 9, "echo": True, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    expected = [i for i, character in enumerate(whole.text) for _ in character.encode()]
    assert whole.logprobs.text_offset == expected
    assert whole.logprobs.tokens is not None
    assert whole.logprobs.tokens[:3] == [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe2"]
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [place for part in parts if part for place in part.text_offset or ()] == expected


def test_places_of_a_prompts_tokens() -> None:
    """A special token, and a space that SentencePiece adds, have no width: the text lacks them."""
    texts = ("<s>", " a", "<s>", r"bytes:\xc3", r"bytes:\xa9\xe6", r"bytes:\x97\xa5")
    run = TokenLogprobs(ids=(0,) * 6, logprobs=(0.0,) * 6, texts=texts)
    assert completion_logprobs([run], [], "a<s>é日")["text_offset"] == [0, 0, 1, 4, 4, 5]
    top = ((1, -1.0), (2, -2.0), (3, -3.0))
    one = TokenLogprobs(
        ids=(1,), logprobs=(-1.0,), top=(top,), texts=texts[3:4], top_texts=(texts[3:],), offsets=(0,)
    )
    assert completion_logprobs([], [one], "")["top_logprobs"] == [
        dict(zip(texts[3:], (-1.0, -2.0, -3.0), strict=True))
    ]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=max_tokens, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "abc" + "AB"[:max_tokens]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(3 + max_tokens))
    assert choice.logprobs.token_logprobs
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1] == -(ord("b") % 8) - 0.5


def test_echo_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model=MODEL, prompt="abc", max_tokens=2, echo=True, logprobs=1, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcAB"
    runs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for run in runs if run for token in run.tokens or []] == list("abcAB")
    assert [at for run in runs if run for at in run.text_offset or []] == list(range(5))


def test_served_model_name() -> None:
    with (
        LiveServer(FakeFrontend(), served_model_name="org/mine") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        assert client.models.retrieve("org/mine").id == "org/mine"
        answer = client.chat.completions.create(model="org/mine", messages=USER, max_tokens=1)
        assert answer.model == "org/mine"
        with pytest.raises(openai.NotFoundError, match="org/mine"):
            client.chat.completions.create(model=MODEL, messages=USER)
