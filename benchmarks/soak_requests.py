"""The requests of `benchmarks.soak`, and the comparison of each answer with that of the request alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jsonschema
import openai

import ramify as rm
from ramify.bench.workloads import words

CHAT = "/v1/chat/completions"
CHANCE = (
    *("id", "created", "prompt_tokens_details", "input_tokens_details", "system_fingerprint"),
    *("ramify", "timings"),
)
"""Fields of an answer that differ between two answers to the same request."""

KINDS = {"plain": 10, "streamed": 5, "hang_up": 2, "abort": 1, "batch": 0.5, "noise": 3}
"""Weight of each kind of request."""
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"kind": {"enum": ["bug", "praise"]}, "score": {"type": "integer", "maximum": 9}},
        "required": ["kind", "score"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[a-c]{2,6}$"},
]
QUESTIONS = [
    {"type": "predicate", "instructions": "Is it a complaint?"},
    {"type": "choice", "instructions": "Which team?", "choices": [{"value": "billing"}, {"value": "sales"}]},
]


class Wrong(AssertionError):
    """An answer that is not the one of the request alone."""


@rm.function
def judged(s: rm.ProgramState, subject: str) -> None:
    s += rm.user(f"Say something about {subject}.")
    s += rm.assistant(rm.gen("answer", max_tokens=12, temperature=0.0))
    branches = s.fork(2)
    for branch, question in zip(branches, ("Why?", "Since when?"), strict=True):
        branch += rm.user(question)
        branch += rm.assistant(rm.gen("more", max_tokens=6, temperature=0.0))
    branches.join()
    s += rm.user("Is that good?")
    s += rm.assistant(rm.select("verdict", choices=["yes", "no"]))


class Client:
    """Sends requests with OpenAI's client. `models`: the names of all models of the server."""

    def __init__(self, url: str, models: Sequence[str] = ()) -> None:
        self.models = models
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        self._native = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
        self._endpoint = rm.RuntimeEndpoint(url)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._native.post(path, body=body, cast_to=object)

    async def get(self, path: str) -> Any:
        return await self._native.get(path, cast_to=object)

    async def stream(
        self, body: dict[str, Any], close_at: int = 0, abort_at: int = 0
    ) -> tuple[str, Any, Any]:
        """(text, usage, finish reason) of a streamed chat. At the chunk `close_at` the socket is closed, at
        `abort_at` the request is aborted; 0: never."""
        said, usage, reason, count = "", None, None, 0
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with await self.openai.chat.completions.create(**body, **options) as stream:
                async for chunk in stream:
                    count += 1
                    usage = chunk.usage and chunk.usage.model_dump(exclude_unset=True)
                    for choice in chunk.choices:
                        said, reason = said + (choice.delta.content or ""), choice.finish_reason or reason
                    if count == abort_at:
                        await self.post("/abort_request", {"rid": chunk.id})
                    if count == close_at:
                        break
        except openai.APIError as error:  # OpenAI's API has no finish reason for it
            if not abort_at or error.code != "cancelled":
                raise
            reason = "abort"
        return said, usage, reason

    async def program(self, subject: str) -> Any:
        state = await asyncio.to_thread(lambda: judged.run(subject=subject, backend=self._endpoint))
        return state["answer"], state["more"], state["verdict"]

    async def batch(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The answers of a batch file of chats, which is deleted afterwards."""
        lines = [
            {"custom_id": str(index), "method": "POST", "url": CHAT, "body": body}
            for index, body in enumerate(bodies)
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        file = await self.openai.files.create(file=("soak.jsonl", data), purpose="batch")
        made: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await self.openai.batches.create(**made)
        while batch.status in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.5)
            batch = await self.openai.batches.retrieve(batch.id)
        if batch.status != "completed" or batch.output_file_id is None or batch.error_file_id is not None:
            raise OSError(f"the batch {batch.id} is {batch.status}: {batch.request_counts}")
        content = await self.openai.files.content(batch.output_file_id)
        found = sorted(map(json.loads, content.text.splitlines()), key=lambda line: int(line["custom_id"]))
        for name in (file.id, batch.output_file_id):
            await self.openai.files.delete(name)
        return [without_chance(line["response"]["body"]) for line in found]

    def close(self) -> None:
        self._endpoint.close()


def without_chance(body: Any) -> Any:
    """`body` without ids, times, and the number of cached tokens. Raises `Wrong` for a usage whose sum is
    not its total."""
    if isinstance(body, list):
        return [without_chance(value) for value in body]
    if not isinstance(body, dict):
        return body
    if (
        "completion_tokens" in body
        and body["prompt_tokens"] + body["completion_tokens"] != body["total_tokens"]
    ):
        raise Wrong(f"the usage does not add up: {body}")
    return {name: without_chance(value) for name, value in body.items() if name not in CHANCE}


def compare(name: str, found: Any, alone: Any) -> None:
    if found != alone:
        raise Wrong(f"{name}: {found!r:.400} and alone {alone!r:.400}")


class Cases:
    """The list of requests, and the answer of each alone."""

    LENGTHS = (12, 30, 80, 200, 700, 1500)
    """Words of the prompts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.alone: dict[str, Any] = {}
        self.chats: dict[str, dict[str, Any]] = {}
        self.all: dict[str, Callable[[], Awaitable[Any]]] = {}
        for model in client.models:
            for index, length in enumerate(self.LENGTHS):
                said = [{"role": "user", "content": f"Go on: {words(length, model, index)}"}]
                chat = {"model": model, "messages": said, "max_tokens": 20, "temperature": 0}
                self.chats[f"chat {model} {index}"] = chat
                self._add(f"chat {model} {index}", CHAT, chat)
                self._add(f"seed {model} {index}", CHAT, chat | {"temperature": 1.0, "seed": index})
            for index, schema in enumerate(SCHEMAS):
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                chat = self.chats[f"chat {model} 0"] | {"response_format": form, "max_tokens": 60}
                self._add(f"schema {model} {index}", CHAT, chat)
            for index in range(3):
                text = words(10 + 40 * index, "text", index)
                decide = {"model": model, "input": text, "questions": QUESTIONS}
                self._add(f"decision {model} {index}", "/v1/decisions", decide)
                self._add(f"embedding {model} {index}", "/v1/embeddings", {"model": model, "input": text})
        for subject in ("rivers", "lamps"):
            self.all[f"program {subject}"] = lambda subject=subject: client.program(subject)

    def _add(self, name: str, path: str, body: dict[str, Any]) -> None:
        async def send() -> Any:
            return without_chance(await self._client.post(path, body))

        self.all[name] = send

    async def send_alone(self) -> None:
        for name, send in self.all.items():
            self.alone[name] = await send()

    async def plain(self, draw: random.Random) -> None:
        name = draw.choice(list(self.all))
        found = await self.all[name]()
        compare(name, found, self.alone[name])
        if name.startswith("schema") and found["choices"][0]["finish_reason"] == "stop":
            text = found["choices"][0]["message"]["content"]
            jsonschema.validate(json.loads(text), SCHEMAS[int(name[-1])])

    async def streamed(self, draw: random.Random) -> None:
        name = draw.choice(list(self.chats))
        said, usage, _ = await self._client.stream(self.chats[name])
        alone = self.alone[name]
        compare(
            name, (said, without_chance(usage)), (alone["choices"][0]["message"]["content"], alone["usage"])
        )

    async def hang_up(self, draw: random.Random) -> None:
        name = draw.choice(list(self.chats))
        said, _, _ = await self._client.stream(self.chats[name], close_at=draw.randint(1, 12))
        whole = self._text(name)
        compare(name, said, whole[: len(said)])

    async def abort(self, draw: random.Random) -> None:
        name = draw.choice(list(self.chats))
        body = self.chats[name] | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        said, _, reason = await self._client.stream(body, abort_at=draw.randint(1, 12))
        whole = self._text(name)
        length = min(len(whole), len(said))
        compare(name, (said[:length], reason), (whole[:length], "abort"))

    def _text(self, name: str) -> str:
        text: str = self.alone[name]["choices"][0]["message"]["content"]
        return text

    async def batch(self, draw: random.Random) -> None:
        names = draw.choices(sorted(self.chats), k=4)
        for name, found in zip(names, await self._client.batch([self.chats[n] for n in names]), strict=True):
            compare(name, found, self.alone[name])

    async def noise(self, draw: random.Random) -> None:
        ids = draw.choices(range(1000, 30_000), k=draw.randint(50, 2500))
        body = {"prompt": ids, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
        answer = await self._client.post(
            "/v1/completions", body | {"model": draw.choice(self._client.models)}
        )
        usage = without_chance(answer)["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(ids), 8):
            raise Wrong(f"{len(ids)} prompt tokens and 8 output tokens were counted as {usage}")
