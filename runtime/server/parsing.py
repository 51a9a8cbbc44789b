"""Parsing a body as a whole: one error names all of its wrong fields, and a header the ignored ones.

A parser raises the error of the first wrong field. The other wrong fields are found by parsing again without
this field::

    {"messages": [{"role": "user", "content": "x", "a": 1}], "top_p": 7, "b": 1}
    parsed without                     error
    nothing                            messages[0].a
    messages[0].a                      top_p
    messages[0].a, top_p               b
    messages[0].a, top_p, b            none: the three are reported
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence, Set
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ramify.errors import InvalidRequest, NotFound, RamifyError
from ramify.runtime.server.body import read_body
from ramify.runtime.server.fields import BodyState, Fields, decode
from ramify.runtime.server.keys.tenants import NotAllowed
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables import ENDPOINTS
from ramify.runtime.server.tables.rows import Endpoint

MAX_PARSES = 16
"""Maximum number of further times that a wrong body is parsed."""
MAX_PARSED_BYTES = 1_000_000
"""Larger bodies are parsed once, in a thread: their error names one field."""

T = TypeVar("T")
Parser = Callable[[Service, Fields], T]
"""Function that parses a body. It has no effects, as it may be called several times."""


async def parse_body(request: Request, endpoint: Endpoint, parse: Parser[T]) -> tuple[T, dict[str, str]]:
    """(the result of `parse` for the request's body, the response header that names the ignored fields).

    Raises the error of the first wrong field, with the errors of the `others`. Values of `endpoint.required`
    take the places of wrong ones while the others are sought.
    """
    service = Service.serving(request)
    data = await read_body(request)
    values: dict[str, msgspec.Raw] = decode(data, dict[str, msgspec.Raw], "")
    strict = service.config.strict_fields
    headers = dict(reversed(request.headers.items()))  # of equal names the first
    fields = Fields(values, body=BodyState(strict=strict, headers=headers))
    try:
        schemas = ("response_format", "text", "constraint")
        if len(data) > MAX_PARSED_BYTES or any(fields.mentions(field, "definitions") for field in schemas):
            # Parsing these schemas, of up to `MAX_SOURCE_BYTES`, takes too long for the event loop.
            parsed = await asyncio.to_thread(parse, service, fields)
        else:
            parsed = parse(service, fields)
    except (InvalidRequest, NotFound) as error:
        if len(data) <= MAX_PARSED_BYTES:

            def parse_without(left_out: set[str]) -> None:
                replaced = {
                    field: msgspec.Raw(msgspec.json.encode(value))
                    for field, value in endpoint.required.items()
                    if field in left_out
                }
                inside = {path for path in left_out if _outermost(path) not in replaced}
                state = BodyState(strict=strict, headers=headers, left_out=inside)
                parse(service, Fields({**values, **replaced}, body=state))

            error.others = await asyncio.to_thread(_find_others, error, parse_without)
        raise
    return parsed, service.tell_ignored(fields.ignored)


def refuse_unknown(path: str, data: bytes) -> None:
    """Raise `UnsupportedField` for the first field of the JSON object `data` that no body for the endpoint at
    `path` has. Unlike `parse_body` it needs no model."""
    for endpoint in ENDPOINTS:
        if endpoint.path == path:
            fields = Fields.parse(data)
            fields.taken.update(name for row in endpoint.whole.rows for name in row.names)
            fields.refuse_rest()


def _find_others(first: RamifyError, parse_without: Callable[[set[str]], None]) -> tuple[RamifyError, ...]:
    """The errors that remain without the field of `first`, and without the fields of further errors."""
    found = [first]
    left_out: set[str] = set()
    error = first
    for _ in range(MAX_PARSES):
        place = error.field or ""
        while place in left_out:  # without this field its object is wrong
            place = _parent(place)
        if not place:
            break
        left_out.add(place)
        try:
            parse_without(left_out)
            break
        except NotAllowed:
            break  # about a value of `required`, which the client has not sent
        except (InvalidRequest, NotFound) as another:
            error = another
        if error.field is not None and not _follows(error, found, left_out):
            found.append(error)
    return tuple(found[1:])


def _outermost(path: str) -> str:
    """The body's field that holds `path`: ``messages`` for ``messages[0].role``."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _parent(path: str) -> str:
    """The path of the object or list that holds `path`: ``messages[0]`` for ``messages[0].role``."""
    return path[: max(path.rfind("."), path.rfind("["), 0)]


def _follows(error: RamifyError, found: Sequence[RamifyError], left_out: Set[str]) -> bool:
    """Whether `error` may follow from leaving out the fields of `found`. There are three such errors: in one
    of these fields, in a field that needs one of them, and of a field that is missing beside one."""
    path = error.field or ""
    missing = "missing" in error.message
    if missing and (outer := _parent(path)) and any(_inside(one, outer) for one in left_out):
        return True
    for earlier in (one.field or "" for one in found):
        if path == earlier or _inside(path, earlier) or _inside(earlier, path):
            return True
        needs = missing or re.search(r"needs |[Gg]ive one of ", error.message)
        about = error.message.replace(path, "")
        names = "|".join(map(re.escape, (earlier, _outermost(earlier))))
        if needs and re.search(rf"(?<![\w.])({names})(?![\w.])", about.rstrip(".")):
            return True
    return False


def _inside(path: str, outer: str) -> bool:
    return path.startswith((f"{outer}.", f"{outer}["))
