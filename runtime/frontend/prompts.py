"""Prompts as callers give them: text, token ids, segments; one or several."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from ramify.errors import InvalidRequest, PromptTooLong
from ramify.messages import ChatMessage, Generate, Segment

Prompt = str | Sequence[int] | Sequence[str | Sequence[int]]
"""Text, token ids, or segments: texts and lists of ids, one after the other."""

MAX_TOKEN_CHARACTERS = 128
"""No vocabulary has a longer token; the longest are runs of spaces."""
MAX_CHOICE_CHARACTERS = 1 << 20
"""Most characters of all choices of one request: about a second for the tokenizer."""
MAX_PREAMBLES = 64
MAX_PARTS = 64
"""Most places of a hint where later prompts part: the text behind each is tokenised. Programs send two."""
KINDS = "a text, a list of token ids, or a list of texts and lists of token ids"


def segments_of(given: Any, field: str = "prompt") -> tuple[Segment, ...]:
    """The segments of one prompt. Raises `InvalidRequest` for anything but a `Prompt`, at `field`."""
    if isinstance(given, str):
        return (given,)
    parts = _items(given, field)
    ids = _ids(parts)
    if ids is not None:
        return (ids,) if ids else ()
    return tuple([_segment(part, f"{field}[{index}]") for index, part in enumerate(parts)])


def prompts_of(given: Any, field: str = "prompts") -> tuple[list[tuple[Segment, ...]], bool]:
    """Segments of each prompt in `given`, and whether that is a list of prompts, not one text or list of ids.

    Raises `InvalidRequest` for an empty list, an empty prompt, and anything that is neither.
    """
    if not isinstance(given, str):
        given = _items(given, field)
        if not given:
            raise InvalidRequest(f"{field} is empty.", field=field, remedy="Give at least one prompt.")
    several = not isinstance(given, str) and _ids(given) is None
    named = [(one, f"{field}[{index}]") for index, one in enumerate(given)] if several else [(given, field)]
    prompts = [segments_of(part, name) for part, name in named]
    for prompt, (_, name) in zip(prompts, named, strict=True):
        if not any(prompt):
            raise InvalidRequest(f"{name} is empty.", field=name)
    return prompts, several


def check_types(request: Generate) -> None:
    """Raise `InvalidRequest` for a prompt or a chat that no other process could read."""
    for index, segment in enumerate(request.prompt):
        if type(segment) is not str and not (type(segment) is tuple and {*map(type, segment)} <= {int}):
            raise _refused(segment, f"prompt[{index}]", "text or a tuple of token ids")
    check_chat(request.chat)


def check_chat(chat: Sequence[ChatMessage] | None) -> None:
    """Raise `InvalidRequest` for what is no list of messages with texts."""
    if chat is None:
        return
    if isinstance(chat, str) or not isinstance(chat, Sequence):
        raise _refused(chat, "chat", "a list of ChatMessage")
    for index, message in enumerate(chat):
        if not isinstance(message, ChatMessage):
            raise _refused(message, f"chat[{index}]", "a ChatMessage")
        for name in ("role", "content"):
            if not isinstance(value := getattr(message, name), str):
                raise _refused(value, f"chat[{index}].{name}", "text")


def check_prompt(request: Generate, most_tokens: int) -> None:
    """Refuse a request that is no prompt or cannot fit: tokenising it would keep others waiting.

    most_tokens : of a prompt that the engine takes

    Raises `InvalidRequest` and `PromptTooLong`.
    """
    check_types(request)
    for field, count, limit in (
        ("preambles", len(request.preambles), MAX_PREAMBLES),
        ("hint.parts", len(request.hint.parts) if request.hint else 0, MAX_PARTS),
        (
            "choices.texts",
            sum(map(len, request.choices.texts)) if request.choices else 0,
            MAX_CHOICE_CHARACTERS,
        ),
    ):
        if count > limit:
            what = "characters together" if field == "choices.texts" else "entries"
            raise InvalidRequest(
                f"{field} has {count} {what}; at most {limit} are taken.",
                field=field,
                remedy="Send several requests." if field == "choices.texts" else "Give fewer.",
            )
    ids = sum(len(part) for part in request.prompt if not isinstance(part, str))
    if ids > most_tokens + 1:  # with max_tokens 0 the context may be full
        raise PromptTooLong(
            f"The prompt has {ids} token ids; this engine takes at most {most_tokens} tokens.",
            field="prompt",
            remedy="Shorten it, or give the engine a larger context_length or kv_memory_gb.",
        )
    chat = request.chat or ()
    if len(chat) > most_tokens:
        raise PromptTooLong(
            f"The chat has {len(chat)} messages, of a token or more each; this engine takes at most"
            f" {most_tokens} tokens.",
            field="messages",
            remedy="Leave out earlier messages, or give the engine a larger context_length or kv_memory_gb.",
        )
    most = most_tokens * MAX_TOKEN_CHARACTERS
    if (size := sum(map(len, _texts(request)))) > most:
        raise PromptTooLong(
            f"The prompt has {size} characters; this engine takes at most {most_tokens}"
            f" tokens, and at most {most} characters.",
            field="prompt",
            remedy="Shorten it, or give the engine a larger context_length or kv_memory_gb.",
        )


def _texts(request: Generate) -> Iterator[str]:
    """All texts from which the tokenizer makes the prompt."""
    yield from (part for part in request.prompt if isinstance(part, str))
    for message in request.chat or ():
        yield from (message.role, message.content, message.name, message.tool_call_id, message.reasoning)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    for preamble in request.preambles:
        yield from (preamble.start, preamble.end)
    yield from (request.tools, request.template_kwargs)


def _segment(given: Any, field: str) -> Segment:
    if isinstance(given, str):
        return given
    ids = _ids(_items(given, field))
    if ids is None:
        raise _refused(given, field, "text or a list of token ids")
    return ids


def _items(given: Any, field: str) -> Sequence[Any]:
    """The items of a sequence or iterator, or of an array of NumPy or PyTorch."""
    items = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(items, Iterator):
        items = list(items)
    if isinstance(items, bytes | bytearray) or not isinstance(items, Sequence):
        raise _refused(given, field, KINDS)
    return items


def _ids(items: Sequence[Any]) -> tuple[int, ...] | None:
    """The integers of `items`; None where they are others."""
    kinds = {*map(type, items)}
    if kinds <= {int}:
        return tuple(items)
    if bool in kinds or not all(hasattr(kind, "__index__") for kind in kinds):
        return None
    return tuple(map(operator.index, items))


def _refused(given: Any, field: str, expected: str) -> InvalidRequest:
    remedies = {"chat": 'Write [ramify.messages.ChatMessage(role="user", content="…")].'}
    return InvalidRequest(
        f"{field} is {given!r:.80}; it must be {expected}.", field=field, remedy=remedies.get(field[:4])
    )
