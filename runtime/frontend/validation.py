"""Validation of complete outputs against their JSON Schema (``strict="validate"``)."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import msgspec

from ramify.constraint import Constraint
from ramify.messages import Generate, TextChunk, Violation

MAX_WAIT_S = 10.0
"""Longest time, in seconds, that an output waits for the validation of others, each of which may take 2 s."""


def to_be_validated(request: Generate) -> bool:
    """Whether the request asks for its whole output to be validated."""
    wanted = request.constraint
    return isinstance(wanted, Constraint) and wanted.kind == "json_schema" and wanted.strict == "validate"


Validate = Callable[[Generate, str], tuple[Violation, ...]]
"""(request, its complete output) → violations."""


def violations(request: Generate, text: str) -> tuple[Violation, ...]:
    """The violations in `text`, a complete output, of keywords of the request's schema."""
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


async def validated(
    request: Generate,
    chunks: AsyncGenerator[TextChunk, None],
    validate: Validate = violations,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[TextChunk]:
    """The `chunks`, with `violations` set in the last one. Closing this iterator closes `chunks`."""
    text = ""
    async with aclosing(chunks):
        async for chunk in chunks:
            text += chunk.text
            if chunk.finish is not None:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(
                    _thread(), _in_time, request, text, clock(), clock, validate
                )
                chunk = msgspec.structs.replace(chunk, violations=found)
            yield chunk


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """An executor with one thread, so that validation never occupies more than one thread beside the event
    loop. `MAX_VALIDATION_S` bounds the time of each text, and `MAX_WAIT_S` the wait in the queue."""
    return ThreadPoolExecutor(1, "ramify-validate")


def _in_time(
    request: Generate, text: str, asked: float, clock: Callable[[], float], validate: Validate
) -> tuple[Violation, ...]:
    """The result of `validate`. If `MAX_WAIT_S` have passed since `asked`, a single violation that says that
    `text` was not validated."""
    if clock() - asked > MAX_WAIT_S:
        waited = f"It was not validated: it waited for more than {MAX_WAIT_S:g} s behind other outputs"
        return (Violation(instance="", schema="", message=waited),)
    return validate(request, text)
