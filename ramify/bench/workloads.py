"""Workloads of load tests: named ones, generated from a seed, and the user's own prompts.

Prompts are common English words, about one token each in the usual vocabularies. So the length of a prompt is
known without the model's tokenizer. Every run of a workload has its own seed, so that prompts share no
prefixes other than those that the workload intends.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.constraint import closed_object
from ramify.errors import InvalidRequest, NotFound

COMPLETIONS, CHAT = "/completions", "/chat/completions"

_COMMON = (
    "able above after again all almost along also answer any apple area arm army around art ask autumn "
    "away baby back ball bank base basket bed before begin behind below best better between big bird "
    "black blood blue board boat body bone book both bottle bottom box boy brain branch bread break "
    "bridge bright bring brother brown build burn business button buy cake call camp captain car card "
    "care carry castle cat catch center chain chair chance change child church circle city class clean "
    "clear clock cloth cloud coast coat coffee cold color common cook copper corn corner cost cotton "
    "count country cover cow credit cross crown cup current curtain curve "
)
WORDS = _COMMON.split()


@dataclass(frozen=True)
class Job:
    """A request.

    For a chat, also the user's later messages. Each is sent after the answer to the message before it.
    """

    path: str
    body: Mapping[str, Any]
    follow_ups: tuple[str, ...] = ()
    schema: Any = None
    """JSON schema of the answer; None for free text."""


@dataclass(frozen=True)
class Phase:
    """Jobs measured together."""

    label: str
    jobs: list[Job]
    concurrency: int
    """Number of jobs in flight, unless jobs arrive at a rate."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that the user sets for all workloads. None: each workload keeps its own size."""

    requests: int | None = None
    concurrency: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    exact: bool = True
    """Whether answers have exactly max_tokens tokens. This needs ``ignore_eos``, which OpenAI's own endpoint
    rejects."""
    prompts: list[dict[str, Any]] = field(default_factory=list)
    """The request bodies of the user's own prompts."""


def words(count: int, *key: object) -> str:
    """A text of `count` words. Equal keys give equal texts."""
    draw = random.Random("/".join(map(str, key)))
    return " ".join(draw.choices(WORDS, k=count))


def phases(name: str, seed: str, sizes: Sizes) -> list[Phase]:
    """The phases of the workload `name`, in the order in which they run."""
    return WORKLOADS[name](seed, sizes)


def _single(seed: str, sizes: Sizes) -> list[Phase]:
    """4 requests, one at a time: 128 prompt tokens and 128 output tokens each."""
    return [_texts("single", seed, sizes, requests=4, concurrency=1, prompt=128, output=128)]


def _batch(seed: str, sizes: Sizes) -> list[Phase]:
    """32 requests at once without a common prefix: 256 prompt tokens and 128 output tokens each."""
    return [_texts("batch", seed, sizes, requests=32, concurrency=32, prompt=256, output=128)]


def _prefix(seed: str, sizes: Sizes) -> list[Phase]:
    """64 requests, then 64 with the prefix cached; 16 at a time. Prompt: 1,500 + 30 tokens; output: 16."""
    shared = words(sizes.prompt_tokens or 1500, seed, "prefix") + " "
    return [
        _texts(
            f"prefix-{step}", seed, sizes, requests=64, concurrency=16, prompt=30, output=16, before=shared
        )
        for step in ("cold", "warm")
    ]


def _texts(
    label: str,
    seed: str,
    sizes: Sizes,
    *,
    requests: int,
    concurrency: int,
    prompt: int,
    output: int,
    before: str = "",
) -> Phase:
    length = prompt if before else sizes.prompt_tokens or prompt
    jobs = [
        Job(
            COMPLETIONS,
            {"prompt": before + words(length, seed, label, index), **_length(sizes, output)},
        )
        for index in range(sizes.requests or requests)
    ]
    return Phase(label, jobs, sizes.concurrency or concurrency)


def _tree(seed: str, sizes: Sizes) -> list[Phase]:
    """8 chats of 5 turns at once, with one system prompt of 600 tokens; 30 tokens in, 48 out per turn."""
    system = {"role": "system", "content": words(sizes.prompt_tokens or 600, seed, "tree")}
    jobs = []
    for index in range(sizes.requests or 8):
        said = [words(30, seed, "tree", index, turn) for turn in range(5)]
        body = {"messages": [system, {"role": "user", "content": said[0]}], **_length(sizes, 48)}
        jobs.append(Job(CHAT, body, tuple(said[1:])))
    return [Phase("tree", jobs, sizes.concurrency or 8)]


def _json_same(seed: str, sizes: Sizes) -> list[Phase]:
    """32 answers under one JSON schema, 8 at a time."""
    schema = closed_object(
        {
            "title": {"type": "string", "maxLength": 24},
            "sort": {"enum": ["plant", "animal", "place", "tool"]},
            "points": {"type": "integer", "minimum": 0, "maximum": 100},
            "labels": {
                "type": "array",
                "items": {"type": "string", "maxLength": 10},
                "minItems": 1,
                "maxItems": 3,
            },
            words(1, seed, "schema"): closed_object(
                {"town": {"type": "string", "maxLength": 16}, "open": {"type": "boolean"}}
            ),
        }
    )
    return [_answers("json-same", seed, sizes, lambda index: schema)]


def _json_many(seed: str, sizes: Sizes) -> list[Phase]:
    """32 answers under 32 JSON schemas, 8 at a time."""
    return [_answers("json-many", seed, sizes, lambda index: _some_schema(random.Random(f"{seed}/{index}")))]


def _answers(label: str, seed: str, sizes: Sizes, schema_of: Callable[[int], Any]) -> Phase:
    jobs = []
    for index in range(sizes.requests or 32):
        schema = schema_of(index)
        fields = ", ".join(schema["properties"])
        request = f"Write a JSON object with the fields {fields} about: {words(12, seed, label, index)}"
        body = {
            "messages": [{"role": "user", "content": request}],
            "max_tokens": sizes.max_tokens or 256,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        }
        jobs.append(Job(CHAT, body, schema=schema))
    return Phase(label, jobs, sizes.concurrency or 8)


def _some_schema(draw: random.Random, nested: bool = False) -> dict[str, Any]:
    def integer() -> dict[str, Any]:
        low = draw.randrange(50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(1, 500)}

    kinds: list[Callable[[], dict[str, Any]]] = [
        integer,
        lambda: {"type": "string", "maxLength": draw.randrange(8, 25)},
        lambda: {"enum": sorted(set(draw.choices(WORDS, k=5)))},
        lambda: {"type": "boolean"},
        lambda: {"type": "array", "items": integer(), "minItems": 1, "maxItems": draw.randrange(2, 5)},
    ]
    if not nested:
        kinds.append(lambda: _some_schema(draw, nested=True))
    names = draw.sample(WORDS, 2 if nested else draw.randrange(4, 7))
    return closed_object({name: draw.choice(kinds)() for name in names})


def _prompts(seed: str, sizes: Sizes) -> list[Phase]:
    """The user's own prompts, 8 at a time."""
    jobs = []
    for body in sizes.prompts[: sizes.requests]:
        path = CHAT if "messages" in body else COMPLETIONS
        wanted = body.get("response_format") or {}
        schema = (wanted.get("json_schema") or {}).get("schema") if isinstance(wanted, dict) else None
        given = {} if "max_tokens" in body else {"max_tokens": sizes.max_tokens or 128}
        jobs.append(Job(path, {**given, **body}, schema=schema))
    return [Phase("prompts", jobs, sizes.concurrency or 8)]


def _length(sizes: Sizes, output: int) -> dict[str, Any]:
    return {"max_tokens": sizes.max_tokens or output, **({"ignore_eos": True} if sizes.exact else {})}


WORKLOADS: dict[str, Callable[[str, Sizes], list[Phase]]] = {
    "single": _single,
    "batch": _batch,
    "prefix": _prefix,
    "tree": _tree,
    "json-same": _json_same,
    "json-many": _json_many,
    "prompts": _prompts,
}


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Read request bodies from a file of JSON lines.

    A line is a body with ``prompt`` or ``messages``, or a string, which is a prompt.
    """
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"There is no file {path}.", field="prompts")
    return [_body(line, f"{path}, line {number}") for number, line in _lines(file)]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8-sig") as text:
        for number, line in enumerate(text, 1):
            if line.strip():
                yield number, line


def _body(line: str, where: str) -> dict[str, Any]:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}, is not JSON: {error}.", field="prompts") from None
    if isinstance(body, str):
        return {"prompt": body}
    if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
        raise InvalidRequest(f'{where}, has not one of "prompt" and "messages".', field="prompts")
    return body
