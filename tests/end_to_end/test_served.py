"""`ramify serve` with real weights, called as users call it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

import ramify as rm
from tests.end_to_end.served import Served, serve
from tests.runtime.test_engine_processes import children, gone
from tests.server.test_health import add_usage, totals

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHAT: list[Any] = [{"role": "user", "content": "Describe a person."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--dtype", "float32") as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60, verify=False) as http:
        yield http


def test_metrics_are_the_sums_of_the_usages(client: openai.OpenAI, http: httpx.Client) -> None:
    sums = totals(http)
    for options in (
        {"prompt": "One two three four", "max_tokens": 9, "stop": " six"},
        {"prompt": ["A b c d", "A b c e"], "max_tokens": 5, "n": 2},
        {"prompt": "Yes or", "max_tokens": 40, "extra_body": {"guided_json": SCHEMA}},
    ):
        answer = client.completions.create(model="default", **options)  # type: ignore[call-overload]
        add_usage(sums, answer.usage.model_dump())
    assert totals(http) == sums


def test_a_chat_is_counted_before_it_is_sent(client: openai.OpenAI, http: httpx.Client) -> None:
    counted = http.post("/tokenize", json={"messages": CHAT}).json()
    answer = client.chat.completions.create(model="default", messages=CHAT, max_tokens=1)
    assert answer.usage is not None
    assert counted["count"] == answer.usage.prompt_tokens
    text = http.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nDescribe a person.<|im_end|>\n<|im_start|>assistant\n")


def test_completion_and_its_cached_repetition(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    model = client.models.list().data[0].id
    first = client.completions.create(model=model, **options)
    again = client.completions.create(model=model, **options)
    assert "Paris" in first.choices[0].text
    assert again.choices[0].text == first.choices[0].text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    # The token before " is" is computed again: a longer token than " is" might have followed it.
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 2


def test_a_schema_is_kept_by_many_at_once(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> Any:
        reply = await client.chat.completions.create(
            model="default",
            messages=CHAT,
            seed=seed,
            temperature=1.0,
            max_tokens=120,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
            },
        )
        assert reply.choices[0].finish_reason == "stop"
        return json.loads(reply.choices[0].message.content or "")

    async def crowd() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
            return list(await asyncio.gather(*(ask(client, seed) for seed in range(8))))

    import jsonschema

    people = asyncio.run(crowd())
    for person in people:
        jsonschema.validate(person, SCHEMA)
    assert len({json.dumps(person) for person in people}) > 1


def test_streams_add_up(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 24


def test_choices_logprobs_and_stop(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default", messages=CHAT, n=3, seed=1, max_tokens=6, logprobs=True, top_logprobs=2
    )
    assert len(reply.choices) == 3
    entries = reply.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    assert "".join(entry.token for entry in entries.content[:2])
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries.content)
    stopped = client.completions.create(
        model="default", prompt="1, 2, 3, 4,", max_tokens=40, temperature=0, stop=", 7"
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.endswith("6")


def test_bad_schemas_are_refused_and_nobody_minds(client: openai.OpenAI) -> None:
    for schema, pointer in (
        ({"type": "object", "properties": {"a": {"type": "nonsense"}}}, "/properties/a"),
        ({"$ref": "#/nowhere"}, ""),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern"),
    ):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(
                model="default",
                messages=CHAT,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
        assert pointer in str(refusal.value)
    assert client.completions.create(model="default", prompt="Hello", max_tokens=2).choices


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{not json", 400, "JSON"),
        (b'{"prompt": "\xff\xfe"}', 400, ""),
        (b'{"model": "default", "prompt": ""}', 400, "prompt"),
        (b'{"model": "default", "prompt": "x", "max_tokens": -2}', 400, "max_tokens"),
        (b'{"model": "default", "prompt": "x", "colour": "red"}', 400, "colour"),
        (json.dumps({"model": "default", "prompt": "word " * 9000}).encode(), 400, "tokens"),
        (
            json.dumps(
                {"model": "default", "prompt": "x", "guided_json": {"enum": ["x" * 10_000_000]}}
            ).encode(),
            400,
            "",
        ),
    ],
    ids=["not-json", "not-utf8", "empty", "negative", "unknown-field", "too-long", "10-MB-schema"],
)
def test_garbage(http: httpx.Client, body: bytes, status: int, says: str) -> None:
    reply = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status
    assert says in reply.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_native_surface(http: httpx.Client) -> None:
    body = {
        "text": ["The capital of France is", "One two three"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    paris, _ = http.post("/generate", json=body).json()
    assert "Paris" in paris["text"]
    assert paris["meta_info"]["prompt_tokens"] == 5
    assert len(paris["meta_info"]["input_token_logprobs"]) == 4
    assert http.post("/flush_cache").status_code == 200
    assert http.get("/health_generate").status_code == 200
    assert "ramify_" in http.get("/metrics").text
    assert http.get("/get_model_info").json()["ramify"]["vocab_size"] == 49152


def test_a_program_over_http_equals_the_engine(served: Served) -> None:
    @rm.function
    def program(s: Any, subject: str) -> None:
        s += rm.system("You answer in few words.")
        s += rm.user(f"Say something about {subject}.")
        s += rm.assistant(rm.gen("answer", max_tokens=16, temperature=0.0, stop="."))
        branches = s.fork(2)
        for branch, question in zip(branches, ("Why?", "Since when?"), strict=True):
            branch += rm.user(question)
            branch += rm.assistant(rm.gen("more", max_tokens=8, temperature=0.0))
        branches.join()
        s += rm.user("Is that good?")
        s += rm.assistant(rm.select("verdict", choices=["yes", "no"]))

    with rm.Engine(dtype="float32") as engine, contextlib.closing(rm.RuntimeEndpoint(served.url)) as remote:
        here, there = (program.run(subject="rivers", backend=backend) for backend in (engine, remote))
    assert here["answer"] == there["answer"]
    assert here["more"] == there["more"]
    assert here["verdict"] == there["verdict"]
    assert here.text() == there.text()
    assert there.usage.cached_tokens > 0


def test_the_live_page_shows_what_was_asked(http: httpx.Client) -> None:
    hint = {"program": "seen", "name": "judge", "path": ["fork 0", "gen verdict"], "forks": ["f"]}
    body = {"text": "Water is", "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "program": hint}
    text = http.post("/generate", json=body).json()["text"]
    assert "Ramify live" in http.get("/").text
    seen = http.get("/live", params={"program": "seen"}).json()
    (call,) = seen["chosen"]["calls"]
    assert (call["path"], call["text"], call["out"]) == (hint["path"], text, 3)
    stats, nodes = seen["stats"], seen["tree"]
    assert stats["pages_total"] == sum(
        stats[f"pages_{where}"] for where in ("free", "evictable", "leased", "in_use")
    )
    assert sum(node[3] for node in nodes) == stats["pages_total"] - stats["pages_free"]
    assert (seen["queue"], stats["running"]) == ([], 0)


def test_sigterm_leaves_nothing_behind() -> None:
    with serve("--dtype", "float32") as served:
        workers = children(served.process.pid)
        assert len(workers) >= 3
        os.kill(served.process.pid, signal.SIGTERM)
        assert served.process.wait(60) == 0
        assert gone(workers)


def test_a_begun_answer_is_continued_up_to_its_stop_string(client: openai.OpenAI) -> None:
    begun: list[Any] = [
        {"role": "user", "content": "Count to five."},
        {"role": "assistant", "content": "Sure: 1, 2,"},
    ]
    answer = client.chat.completions.create(
        model="default",
        messages=begun,
        temperature=0,
        stop=" 4",
        extra_body={"continue_final_message": True, "include_stop_str_in_output": True, "max_tokens": -1},
    )
    assert answer.choices[0].message.content == " 3, 4"
