"""Validates outputs against their JSON Schema after the end (``strict="validate"``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import Generate, TextChunk, Violation


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
                chunk = msgspec.structs.replace(chunk, violations=violations(request, text))
            yield chunk


def violations(request: Generate, text: str) -> tuple[Violation, ...]:
    """The keywords of the request's schema that `text`, a whole output, does not satisfy."""
    # Imported here: a frontend needs the grammar package for nothing else.
    from ramify.grammar.schema.instance import validate
    from ramify.grammar.schema.values.json_text import parse_json

    assert request.constraint is not None
    for preamble in request.preambles:
        _, _, text = text.partition(preamble.end)
    try:
        value = parse_json(text)
    except InvalidRequest:
        return (Violation(instance="", schema="", message="The output is not whole JSON."),)
    schema = parse_json(request.constraint.source)
    return tuple(
        Violation(instance=failure.instance, schema=failure.schema, message=failure.message)
        for failure in validate(schema, value)
    )
