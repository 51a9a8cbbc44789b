"""The file format of a recorded run, and the differences between two requests.

The file is JSON lines: a header about the backend, then a line for each request with its answer, or for each
question of a request. The line is written when the answer has ended. The fields `rid` and `hint` of a request
are left out because they differ from run to run. The fields `every_s` and `priority` are left out because
they affect only the timing and chunking of the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ramify.errors import ErrorInfo, InvalidRequest
from ramify.lang.trace.calls import Call
from ramify.messages import ChatMessage, Generate, TextChunk, Usage
from ramify.model_info import ModelInfo
from ramify.questions import DecisionScores
from ramify.text import shortened

VERSION = 1
HEADER = b'{"ramify_recording":'
"""Begin of the line of a `Header`."""
MAX_SHOWN = 120
"""Longest value in a message, in characters."""
CONTEXT = 30
"""Number of characters shown on each side of the first difference between two prompts."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a recording. The first line is that of the model of requests that name none."""

    ramify_recording: int
    info: ModelInfo
    takes_messages: bool
    model: str = ""
    """The name by which programs choose the model."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and its answer."""

    number: int
    """The request's position in the order in which requests came."""
    path: str
    """The step of the program that sent the request, as given by `call_path`."""
    request: Generate
    model: str = ""
    chunks: tuple[TextChunk, ...] = ()
    error: ErrorInfo | None = None
    """The error that was raised after the chunks; None if there was none."""
    ended: bool = True
    """Whether the answer came to its end; False if the caller cancelled the request."""


def bare(request: Generate) -> Generate:
    """`request` without the fields that do not change its answer."""
    return msgspec.structs.replace(request, rid="", hint=None, every_s=0.0, priority=0)


def key_of(request: Generate) -> bytes:
    """Bytes that are equal for requests that differ only in fields without effect on the answer."""
    return msgspec.json.encode(bare(request))


# --- questions ----------------------------------------------------------------------------------


def by_question(request: Generate) -> list[Generate]:
    """`request` as a request for each of its questions; `request` alone without several questions.

    An answer does not depend on the questions beside it. So a recording has an exchange for each question,
    and is replayed whichever of them a program asks in one request.
    """
    decide = request.decide
    if decide is None or len(decide.questions) < 2:
        return [request]
    alone = [msgspec.structs.replace(decide, questions=(question,)) for question in decide.questions]
    return [msgspec.structs.replace(request, decide=one) for one in alone]


def split(exchange: Exchange) -> list[Exchange]:
    """`exchange` as one for each question. The first has the usage."""
    requests = by_question(exchange.request)
    if len(requests) == 1:
        return [exchange]
    found = [msgspec.structs.replace(exchange, request=request, chunks=()) for request in requests]
    if exchange.chunks and (scores := exchange.chunks[-1].decisions) is not None:
        for index, one in enumerate(scores.questions):
            own = msgspec.structs.replace(scores, questions=(one,))
            usage = exchange.chunks[-1].usage if index == 0 else Usage()
            chunk = msgspec.structs.replace(exchange.chunks[-1], decisions=own, usage=usage)
            found[index] = msgspec.structs.replace(found[index], chunks=(chunk,))
    return found


def joined(exchanges: Sequence[Exchange]) -> Exchange:
    """One exchange with the questions of `exchanges`, which `split` has made, and the first error."""
    first = exchanges[0]
    if len(exchanges) == 1:
        return first
    failed = next((one for one in exchanges if not one.chunks), None)
    if failed is not None:
        return failed
    scores = [one.chunks[-1].decisions for one in exchanges]
    questions = tuple([each for one in scores if one is not None for each in one.questions])
    decisions = DecisionScores(questions=questions)
    return msgspec.structs.replace(
        first, chunks=(msgspec.structs.replace(first.chunks[-1], decisions=decisions),)
    )


def call_path(call: Call | None) -> str:
    """The names of the calls from the outermost to this one, such as ``fork 0/gen verdict``."""
    names: list[str] = []
    while call is not None:
        names.append(call.name if call.kind in ("program", "fork") else f"{call.kind} {call.name}")
        call = call.parent
    return "/".join(reversed(names))


def read(path: str | os.PathLike[str]) -> tuple[list[Header], list[Exchange]]:
    """Read the recording at `path`: its models, and the exchanges in the order of their requests. Raises
    `InvalidRequest` if the file is not a recording."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"The recording cannot be read: {error}.", field="path") from None
    exchanges: list[Exchange] = []
    headers: list[Header] = []
    try:
        for line in lines or [b""]:
            if not headers or line.startswith(HEADER):
                headers.append(msgspec.json.decode(line, type=Header))
            else:
                exchanges.append(msgspec.json.decode(line, type=Exchange))
    except msgspec.DecodeError as error:  # ValidationError is one
        bad = len(headers) + len(exchanges) + 1
        raise InvalidRequest(f"{path}, line {bad}, is not of a recording: {error}.", field="path") from None
    if headers[0].ramify_recording != VERSION:
        raise InvalidRequest(
            f"{path} has version {headers[0].ramify_recording}; this is version {VERSION}.", field="path"
        )
    return headers, sorted(exchanges, key=lambda exchange: exchange.number)


# --- differences --------------------------------------------------------------------------------


def difference(request: Generate, recorded: Generate) -> str:
    """The differences between `request` and the recorded request, in words."""
    parts = []
    if request.prompt != recorded.prompt or request.chat != recorded.chat:
        parts.append(_prompt_difference(request, recorded))
    for name in Generate.__struct_fields__:
        now, then = getattr(request, name), getattr(recorded, name)
        if name in ("rid", "hint", "every_s", "prompt", "chat") or now == then:
            continue
        if name == "sampling":
            fields = [field for field in now.__struct_fields__ if getattr(now, field) != getattr(then, field)]
            parts += [f"{field} is {getattr(now, field)!r}, was {getattr(then, field)!r}" for field in fields]
        else:
            parts.append(
                f"{name} is {shortened(repr(now), MAX_SHOWN)}, was {shortened(repr(then), MAX_SHOWN)}"
            )
    return "; ".join(parts)


def likeness(request: Generate, recorded: Generate) -> tuple[float, int]:
    """Similarity of two requests: the share of the prompt that is a common prefix, and the number of equal
    fields."""
    ours, theirs = list(_units(request)), list(_units(recorded))
    shared = common(ours, theirs)
    same = sum(getattr(request, name) == getattr(recorded, name) for name in Generate.__struct_fields__)
    return shared / max(len(ours), len(theirs), 1), same


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)


def _units(request: Generate) -> Iterator[str | int]:
    """Yield the characters and token ids of a prompt. A turn of a chat begins with the characters of its
    role."""
    if request.chat is not None:
        for turn in request.chat:
            yield from _turn(turn)
    for segment in request.prompt:
        yield from segment


def _turn(turn: ChatMessage) -> str:
    return f"<{turn.role}> {turn.content}" + "".join(str(call) for call in turn.tool_calls)


def _prompt_difference(request: Generate, recorded: Generate) -> str:
    ours, theirs = list(_units(request)), list(_units(recorded))
    place = common(ours, theirs)
    if ours == theirs:
        return "the prompt is the same, split into other segments"
    end = place + CONTEXT
    before, now, then = (
        _show(units) for units in (ours[max(0, place - CONTEXT) : place], ours[place:end], theirs[place:end])
    )
    return (
        f"the prompt differs from position {place} on, after {before}: it continues with {now}, "
        f"recorded was {then}"
    )


def _show(units: Sequence[str | int]) -> str:
    """Part of a prompt for a message: characters as quoted text, token ids in brackets."""
    if not units:
        return "nothing"
    shown: list[str] = []
    text = ""
    for unit in units:
        if isinstance(unit, str):
            text += unit
            continue
        if text:
            shown.append(repr(text))
            text = ""
        shown.append(f"[{unit}]")
    return "".join(shown + ([repr(text)] if text else []))
