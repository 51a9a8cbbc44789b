"""Answers under published schemas over HTTP, with the least tokens and with more, beside other requests."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import aiohttp

from tests.grammar.collection.cases import Case
from tests.grammar.collection.oracle import oracle

FACTORS = (1.0, 1.2, 2.0)
AT_ONCE = 8
"""Schemas asked for at the same time."""
LONGEST = 4000
"""Tokens of a shortest completion above which a schema is not asked for: the context is 8192."""


class Finding(NamedTuple):
    """`fault`: "" for a valid answer; "refused" and "too long" count apart."""

    case: str
    budget: int
    streamed: bool
    fault: str
    text: str = ""


class Client:
    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response's JSON body, of the first attempt for which the server has room."""
        body = {"model": self._model, **body}
        while True:
            async with self._session.post("/v1/chat/completions", json=body) as response:
                if response.status not in (429, 503):
                    return await response.json()
            await asyncio.sleep(float(response.headers.get("Retry-After", 1)))

    async def text(self, body: dict[str, Any]) -> tuple[str, str]:
        """(text, finish_reason or error) of an answer."""
        if not body.get("stream"):
            answer = await self.ask(body)
            if "error" in answer:
                return "", "error: " + answer["error"]["message"]
            return answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        text, reason = "", "none"
        body = {"model": self._model, **body}
        async with self._session.post("/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return text, "error: " + event["error"]["message"]
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        reason = choice["finish_reason"] or reason
                elif line.startswith(b"{"):
                    return "", "error: " + json.loads(line)["error"]["message"]
        return text, reason


def body_of(schema: Any, seed: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Answer with an example, in JSON."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
        "temperature": 1.0,
        "seed": seed,
    }


async def findings(client: Client, case: Case, seed: int) -> list[Finding]:
    """The answers under each budget, streamed and not."""
    body = body_of(case.schema, seed)
    answer = await client.ask({**body, "max_tokens": 1})
    needed = 1
    if "error" in answer:
        least = re.search(r"at least (\d+) tokens", answer["error"]["message"])
        if least is None:
            return [Finding(repr(case), 1, False, "refused", answer["error"]["message"])]
        needed = int(least[1])
    if needed > LONGEST:
        return [Finding(repr(case), needed, False, "too long")]
    is_valid = oracle(case.schema)

    async def one(factor: float, stream: bool) -> Finding:
        budget = math.ceil(factor * needed)
        text, reason = await client.text({**body, "max_tokens": budget, "stream": stream})
        return Finding(repr(case), budget, stream, fault(is_valid, text, reason), text)

    return await asyncio.gather(*(one(factor, stream) for factor in FACTORS for stream in (False, True)))


def fault(is_valid: Any, text: str, reason: str) -> str:
    if reason != "stop":
        return f"finish_reason {reason}"
    try:
        return "" if is_valid(text) else "invalid"
    except ValueError:
        return "no JSON"


async def others(client: Client, number: int) -> None:
    """Send one other request after the other, without an end."""
    random = Random(number)
    while True:
        length = random.randint(8, 64)
        words = " ".join(
            random.choices(["tree", "river", "stone", "light", "seven"], k=random.randint(1, 60))
        )
        await client.text(
            {
                "messages": [{"role": "user", "content": words}],
                "max_tokens": length,
                "temperature": 1.0,
                "stream": bool(number % 2),
            }
        )


async def ask_all(url: str, cases: Sequence[Case], beside: int, seed: int) -> list[Finding]:
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        async with session.get("/v1/models") as response:
            client = Client(session, (await response.json())["data"][0]["id"])
        places = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, case: Case) -> list[Finding]:
            async with places:
                return await findings(client, case, seed + number)

        background = [asyncio.create_task(others(client, number)) for number in range(beside)]
        try:
            found = await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))
        finally:
            for task in background:
                task.cancel()
        return [each for of_case in found for each in of_case]
