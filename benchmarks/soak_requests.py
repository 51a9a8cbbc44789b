"""The requests of `benchmarks.soak`, and the comparison of each answer with that of the request alone."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter
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

KINDS = {
    "plain": 10,
    "streamed": 5,
    "hang_up": 2,
    "abort": 1,
    "batch": 0.5,
    "noise": 3,
    "lease": 2,
    "pin": 0.5,
    "scopes": 1,
}
"""Weight of each kind of request."""
LEASE_S = 20.0
"""Seconds of leases and pins that nobody releases."""
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


SUBJECTS = ("rivers", "lamps")
"""Arguments of the programs."""


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
    """Sends requests with OpenAI's client, with the API key `key`."""

    def __init__(self, url: str, key: str = "none") -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
        self._native = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
        self._endpoint = rm.RuntimeEndpoint(url, api_key=key)

    async def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        options: Any = {} if headers is None else {"headers": headers}
        return await self._native.post(path, body=body, cast_to=object, options=options)

    async def get(self, path: str) -> Any:
        return await self._native.get(path, cast_to=object)

    async def stream(
        self, body: dict[str, Any], close_at: int = 0, abort_at: int = 0, strangers: Sequence[Client] = ()
    ) -> tuple[str, Any, Any]:
        """(text, usage, finish reason) of a streamed chat. At the chunk `close_at` the socket is closed, at
        `abort_at` the request is aborted; 0: never. `strangers`, clients with other keys, try it before.
        Raises `Wrong` if one of them can."""
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
                        for stranger in strangers:
                            if (await stranger.post("/abort_request", {"rid": chunk.id}))["aborted"]:
                                raise Wrong(f"another key aborted {chunk.id}")
                        await self.post("/abort_request", {"rid": chunk.id})
                    if count == close_at:
                        break
        except openai.APIError as error:  # OpenAI's API has no finish reason for it
            if not abort_at or error.code != "cancelled":
                raise
            reason = "abort"
        return said, usage, reason

    async def program(self, subject: str, *, again: bool = False) -> Any:
        """The variables of a program; with `again` those of its second run, while the first one is pinned."""

        def run() -> Any:
            state = judged.run(subject=subject, backend=self._endpoint)
            if again:
                with rm.pin(state, seconds=LEASE_S):
                    state = judged.run(subject=subject, backend=self._endpoint)
            return state["answer"], state["more"], state["verdict"]

        return await asyncio.to_thread(run)

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

    async def close(self) -> None:
        self._endpoint.close()
        await self.openai.close()
        await self._native.close()


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


Case = Callable[[Client], Awaitable[Any]]


class Cases:
    """The list of requests, and the answer of each alone.

    models : the names of all models of the server. Programs use the first one.
    clients : one for each API key. The cache scopes of the keys have to be different.

    Each kind of request (`KINDS`) is a coroutine of a random draw, a client, and a model.
    """

    LENGTHS = (12, 30, 80, 200, 700, 1500)
    """Words of the prompts."""

    def __init__(self, models: Sequence[str], clients: Sequence[Client]) -> None:
        self.models, self.clients = models, clients
        self.alone: dict[str, Any] = {}
        self.chats: dict[str, dict[str, dict[str, Any]]] = {}
        """Model → name → body."""
        self.all: dict[str, dict[str, Case]] = {}
        """Model → name → request."""
        self.found = Counter[str]()
        """Prompts of `scopes` that their own key sent again, and those of them that were in the cache."""
        for model in models:
            self.all[model], self.chats[model] = {}, {}
            for index, length in enumerate(self.LENGTHS):
                said = [{"role": "user", "content": f"Go on: {words(length, model, index)}"}]
                chat = {"model": model, "messages": said, "max_tokens": 20, "temperature": 0}
                self.chats[model][f"chat {model} {index}"] = chat
                self._add(f"chat {model} {index}", CHAT, chat)
                self._add(f"seed {model} {index}", CHAT, chat | {"temperature": 1.0, "seed": index})
            for index, schema in enumerate(SCHEMAS):
                form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
                short = self.chats[model][f"chat {model} 0"]
                body = short | {"response_format": form, "max_tokens": 60}
                self._add(f"schema {model} {index}", CHAT, body)
            for index in range(3):
                text = words(10 + 40 * index, "text", index)
                decide = {"model": model, "input": text, "questions": QUESTIONS}
                self._add(f"decision {model} {index}", "/v1/decisions", decide)
                self._add(f"embedding {model} {index}", "/v1/embeddings", {"model": model, "input": text})
        for subject in SUBJECTS:
            self.all[models[0]][f"program {subject}"] = functools.partial(Client.program, subject=subject)

    def _add(self, name: str, path: str, body: dict[str, Any]) -> None:
        async def send(client: Client) -> Any:
            return without_chance(await client.post(path, body))

        self.all[body["model"]][name] = send

    async def send_alone(self) -> None:
        for cases in self.all.values():
            for name, send in cases.items():
                self.alone[name] = await send(self.clients[0])

    async def plain(self, draw: random.Random, client: Client, model: str) -> None:
        name = draw.choice(list(self.all[model]))
        found = await self.all[model][name](client)
        compare(name, found, self.alone[name])
        if name.startswith("schema") and found["choices"][0]["finish_reason"] == "stop":
            text = found["choices"][0]["message"]["content"]
            jsonschema.validate(json.loads(text), SCHEMAS[int(name[-1])])

    async def streamed(self, draw: random.Random, client: Client, model: str) -> None:
        name, body = self._chat(draw, model)
        said, usage, _ = await client.stream(body)
        alone = self.alone[name]
        compare(
            name, (said, without_chance(usage)), (alone["choices"][0]["message"]["content"], alone["usage"])
        )

    async def hang_up(self, draw: random.Random, client: Client, model: str) -> None:
        name, body = self._chat(draw, model)
        said, _, _ = await client.stream(body, close_at=draw.randint(1, 12))
        whole = self._text(name)
        compare(name, said, whole[: len(said)])

    async def abort(self, draw: random.Random, client: Client, model: str) -> None:
        name, body = self._chat(draw, model)
        body = body | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        strangers = [other for other in self.clients if other is not client]
        said, _, reason = await client.stream(body, abort_at=draw.randint(1, 12), strangers=strangers)
        whole = self._text(name)
        length = min(len(whole), len(said))
        compare(name, (said[:length], reason), (whole[:length], "abort"))

    async def batch(self, draw: random.Random, client: Client, model: str) -> None:
        names = draw.choices(sorted(self.chats[model]), k=4)
        answers = await client.batch([self.chats[model][name] for name in names])
        for name, found in zip(names, answers, strict=True):
            compare(name, found, self.alone[name])

    async def noise(self, draw: random.Random, client: Client, model: str) -> None:
        body = {"model": model, "prompt": _ids(draw), "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
        usage = without_chance(await client.post("/v1/completions", body))["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(body["prompt"]), 8):
            raise Wrong(f"{len(body['prompt'])} prompt tokens and 8 output tokens were counted as {usage}")

    async def lease(self, draw: random.Random, client: Client, model: str) -> None:
        """A chat whose pages a program keeps, and now and then the program's end."""
        name, body = self._chat(draw, model)
        program = f"soak-{draw.randint(0, 4)}"
        headers = {"x-ramify-program": program, "x-ramify-lease": str(LEASE_S)}
        compare(name, without_chance(await client.post(CHAT, body, headers)), self.alone[name])
        if draw.random() < 0.3:
            await client.post("/end_program", {"program": program})

    async def pin(self, draw: random.Random, client: Client, model: str) -> None:
        subject = draw.choice(SUBJECTS)
        found = await client.program(subject, again=True)
        compare(f"program {subject}", found, self.alone[f"program {subject}"])

    async def scopes(self, draw: random.Random, client: Client, model: str) -> None:
        """A new prompt by one key, by another one, which must find nothing of it, and by the first again."""
        other = draw.choice([other for other in self.clients if other is not client] or [None])
        body = {"model": model, "prompt": _ids(draw), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answers = [await each.post("/v1/completions", body) for each in (client, other, client) if each]
        for answer in answers[1:]:
            compare("the same prompt", without_chance(answer), without_chance(answers[0]))
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        if any(cached[: 1 if other is None else 2]):
            raise Wrong(f"{cached} tokens of a new prompt are cached for a key, another one, and the first")
        self.found.update({"sent again": 1, "found": int(cached[-1] > 0)})

    def _chat(self, draw: random.Random, model: str) -> tuple[str, dict[str, Any]]:
        return draw.choice(list(self.chats[model].items()))

    def _text(self, name: str) -> str:
        text: str = self.alone[name]["choices"][0]["message"]["content"]
        return text


def _ids(draw: random.Random) -> list[int]:
    """A prompt that is never drawn again."""
    return draw.choices(range(1000, 30_000), k=draw.randint(50, 2500))
