"""Outputs are validated outside the event loop, which answers other requests meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ramify import constraint
from ramify.messages import Finish, Generate, Preamble, TextChunk, Violation
from ramify.runtime.frontend.validation import validated, violations


def request(schema: Any, **fields: Any) -> Generate:
    return Generate(rid="r", constraint=constraint.json_schema(schema, strict="validate"), **fields)


async def chunks() -> AsyncGenerator[TextChunk, None]:
    yield TextChunk(rid="r", text="9")
    yield TextChunk(rid="r", text="E3", finish=Finish(reason="stop"))


def test_the_loop_runs_while_an_output_is_validated() -> None:
    begun, others = threading.Event(), threading.Event()
    names: list[str] = []

    def slow(request: Generate, text: str) -> tuple[Violation, ...]:
        names.append(threading.current_thread().name)
        begun.set()
        assert others.wait(60), "the event loop stood still"
        return (Violation(instance="", schema="/x", message=text),)

    async def other() -> None:
        while not begun.is_set():
            await asyncio.sleep(0)
        others.set()

    async def run() -> list[TextChunk]:
        beside = asyncio.create_task(other())
        found = [chunk async for chunk in validated(request({"type": "number"}), chunks(), slow)]
        await beside
        return found

    first, last = asyncio.run(run())
    assert first.violations is None
    assert last.violations == (Violation(instance="", schema="/x", message="9E3"),)
    assert names[0].startswith("ramify-validate")


def test_outputs_that_wait_too_long_are_not_validated() -> None:
    run: list[str] = []
    now = 0.0

    def slow(request: Generate, text: str) -> tuple[Violation, ...]:
        nonlocal now
        assert all_asked.wait(60)
        run.append(text)
        now += 2.0
        return ()

    all_asked = threading.Event()

    async def last() -> tuple[Violation, ...] | None:
        asked = request({"type": "number"})
        *_, chunk = [chunk async for chunk in validated(asked, chunks(), slow, lambda: now)]
        found: tuple[Violation, ...] | None = chunk.violations
        return found

    async def outputs() -> list[tuple[Violation, ...] | None]:
        tasks = [asyncio.create_task(last()) for _ in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)
        all_asked.set()
        return await asyncio.gather(*tasks)

    found = asyncio.run(outputs())
    assert len(run) == 6  # those that have waited for 0 to 10 s
    assert found[:6] == [()] * 6
    for late in found[6:]:
        assert late is not None
        assert "was not validated: it waited for more than 10 s" in late[0].message


@pytest.mark.parametrize(
    ("text", "schema", "message"),
    [
        ("9E99999999", "/multipleOf", "too long"),
        ("9" * 5000, "/multipleOf", "too long"),
        ("9E300", "/multipleOf", "9E+300 is no multiple of 999983"),
        ("999983E300", "", ""),
    ],
)
def test_violations_of_large_numbers(text: str, schema: str, message: str) -> None:
    asked = request({"type": "number", "multipleOf": 999983}, preambles=(Preamble(end="</think>"),))
    found = violations(asked, "1e999999999</think>" + text)
    if not message:
        assert found == ()
        return
    (violation,) = found
    assert message in violation.message
    assert violation.schema in ("", schema)
