"""Outputs whose schema is in part only checked afterwards: what they do not satisfy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import Generate, TextChunk, Violation


def to_be_validated(request: Generate) -> bool:
    """Keywords that cannot be enforced are to be checked once the output is there."""
    wanted = request.constraint
    return wanted is not None and wanted.kind == "json_schema" and wanted.strict == "validate"


async def validated(request: Generate, chunks: AsyncGenerator[TextChunk, None]) -> AsyncIterator[TextChunk]:
    """`chunks`, the last with its `violations`. Closing it closes `chunks`."""
    text = ""
    async with aclosing(chunks):
        async for chunk in chunks:
            text += chunk.text
            if chunk.finish is not None:
                chunk = msgspec.structs.replace(chunk, violations=violations(request, text))
            yield chunk


def violations(request: Generate, text: str) -> tuple[Violation, ...]:
    """What `text`, a whole output, does not satisfy of its schema."""
    # These load the grammar package, which a frontend does not need for anything else.
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
