"""Validates outputs against their JSON Schema after the end (``strict="validate"``)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec

from ramify.messages import Generate, TextChunk, Violation

MAX_WAIT_S = 10.0
"""Longest wait of an output behind others to be validated, in seconds; each of them may take 2 s."""


def to_be_validated(request: Generate) -> bool:
    """Whether the request asks for its whole output to be validated."""
    wanted = request.constraint
    return wanted is not None and wanted.kind == "json_schema" and wanted.strict == "validate"


async def validated(request: Generate, chunks: AsyncGenerator[TextChunk, None]) -> AsyncIterator[TextChunk]:
    """The same chunks, the last with `violations`. Closing this iterator closes `chunks`."""
    text = ""
    async with aclosing(chunks):
        async for chunk in chunks:
            text += chunk.text
            if chunk.finish is not None:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(_thread(), _in_time, request, text, time.monotonic())
                chunk = msgspec.structs.replace(chunk, violations=found)
            yield chunk


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """The only thread that validates: one text takes a bounded time (`time_limit`), and never more than one
    thread is busy beside the event loop. `MAX_WAIT_S` bounds the wait."""
    return ThreadPoolExecutor(1, "ramify-validate")


def _in_time(request: Generate, text: str, asked: float) -> tuple[Violation, ...]:
    """`violations`, or where `MAX_WAIT_S` have passed since `asked`, that it was not validated."""
    if time.monotonic() - asked > MAX_WAIT_S:
        waited = f"It was not validated: it waited for more than {MAX_WAIT_S:g} s behind other outputs"
        return (Violation(instance="", schema="", message=waited),)
    return violations(request, text)


def violations(request: Generate, text: str) -> tuple[Violation, ...]:
    """The keywords of the request's schema that `text`, a whole output, does not satisfy."""
    # Imported here: a frontend needs the grammar package for nothing else.
    from ramify.grammar.schema.document.json_values import parse_json
    from ramify.grammar.schema.instance import validate_text

    assert request.constraint is not None
    for preamble in request.preambles:
        _, _, text = text.partition(preamble.end)
    return tuple(
        Violation(instance=failure.instance, schema=failure.schema, message=failure.message)
        for failure in validate_text(parse_json(request.constraint.source), text)
    )
