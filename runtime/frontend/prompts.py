"""Prompts as callers write them: one prompt or a list of prompts, each as text, token ids or segments."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from ramify.errors import InvalidRequest, PromptTooLong
from ramify.messages import ChatMessage, Generate, Segment
from ramify.model_info import MORE_ROOM

Prompt = str | Sequence[int] | Sequence[str | Sequence[int]]
"""Text, token ids, or a list of segments, each of which is a text or a list of token ids."""

MAX_TOKEN_CHARACTERS = 128
"""Maximum length of a token in characters, in any vocabulary. The longest tokens are runs of spaces."""
MAX_CHOICE_CHARACTERS = 1 << 20
"""Maximum total length of a request's choices, in characters: the tokenizer takes about a second for that."""
MAX_DECIDE_CHARACTERS = 8 << 20
"""Maximum total length of a request's questions, in characters."""
MAX_PREAMBLES = 64
MAX_PARTS = 64
"""Maximum number of entries of `hint.parts`: places at which later prompts diverge from this one. The text
after each place is tokenised separately. Programs send two entries."""
KINDS = "a text, a list of token ids, or a list of texts and lists of token ids"


def segments_of(given: Any, field: str = "prompt") -> tuple[Segment, ...]:
    """The segments of one prompt. Raises `InvalidRequest`, naming `field`, unless `given` is a `Prompt`."""
    if isinstance(given, str):
        return (given,)
    parts = _items(given, field)
    ids = _ids(parts)
    if ids is not None:
        return (ids,) if ids else ()
    return tuple([_segment(part, f"{field}[{index}]") for index, part in enumerate(parts)])


def prompts_of(given: Any, field: str = "prompts") -> tuple[list[tuple[Segment, ...]], bool]:
    """(segments of each prompt in `given`, whether `given` is a list of prompts). A text or a list of token
    ids is one prompt.

    Raises `InvalidRequest` for an empty list, an empty prompt, and a `given` that is neither a prompt nor a
    list of prompts.
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
    """Raise `InvalidRequest` for a prompt or a chat with values of wrong types."""
    for index, segment in enumerate(request.prompt):
        if type(segment) is not str and not (type(segment) is tuple and {*map(type, segment)} <= {int}):
            raise _refused(segment, f"prompt[{index}]", "text or a tuple of token ids")
    check_chat(request.chat)


def check_chat(chat: Sequence[ChatMessage] | None) -> None:
    """Raise `InvalidRequest` unless `chat` is None or messages whose roles and contents are texts."""
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


def check_prompt(request: Generate, most_tokens: int, remedy: str = MORE_ROOM) -> None:
    """Check the prompt of a request before it is tokenised, as tokenising a prompt that is too long delays
    others.

    most_tokens : length of the longest prompt that the engine takes
    remedy : `KvRoom.remedy` of the engine

    Raises `InvalidRequest` for values of wrong types and too many entries, and `PromptTooLong` for a prompt
    that cannot fit.
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
        ("decide.questions", sum(map(len, _question_texts(request))), MAX_DECIDE_CHARACTERS),
    ):
        if count > limit:
            texts = field in ("choices.texts", "decide.questions")
            what = "characters together" if texts else "entries"
            raise InvalidRequest(
                f"{field} has {count} {what}; at most {limit} are taken.",
                field=field,
                remedy="Send several requests." if texts else "Give fewer.",
            )
    ids = sum(len(part) for part in request.prompt if not isinstance(part, str))
    if ids > most_tokens + 1:  # with max_tokens 0 the prompt may fill the whole context
        raise PromptTooLong(
            f"This model's maximum context length is {most_tokens + 1} tokens. However, your messages"
            f" resulted in {ids} tokens.",
            field="prompt",
            remedy=f"Send less text, or {remedy}.",
            lengths=(ids, 0, most_tokens + 1),
        )
    chat = request.chat or ()
    if len(chat) > most_tokens:
        raise PromptTooLong(
            f"This model's maximum context length is {most_tokens + 1} tokens. However, there are"
            f" {len(chat)} messages, of a token or more each.",
            field="messages",
            remedy=f"Leave out earlier messages, or {remedy}.",
        )
    most = most_tokens * MAX_TOKEN_CHARACTERS
    if (size := sum(map(len, _texts(request)))) > most:
        raise PromptTooLong(
            f"This model's maximum context length is {most_tokens + 1} tokens. However, your messages"
            f" resulted in {size} characters; at most {most} are taken.",
            field="prompt",
            remedy=f"Send less text, or {remedy}.",
        )


def _texts(request: Generate) -> Iterator[str]:
    yield from (part for part in request.prompt if isinstance(part, str))
    if request.fill is not None:
        yield request.fill.suffix
        yield from (text for file in request.fill.files for text in file)
    for message in request.chat or ():
        yield from (message.role, message.content, message.name, message.tool_call_id, message.reasoning)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    for preamble in request.preambles:
        yield from (preamble.start, preamble.end)
    if request.decide is not None:
        yield from (request.decide.opening or "", request.decide.closing or "")
    yield from (request.tools, request.template_kwargs)


def _question_texts(request: Generate) -> Iterator[str]:
    for question in () if request.decide is None else request.decide.questions:
        yield question.instructions
        for option in question.options:
            yield from (option.name, option.description)


def _segment(given: Any, field: str) -> Segment:
    if isinstance(given, str):
        return given
    ids = _ids(_items(given, field))
    if ids is None:
        raise _refused(given, field, "text or a list of token ids")
    return ids


def _items(given: Any, field: str) -> Sequence[Any]:
    """The items of a sequence, iterator, NumPy or PyTorch array. Raises `InvalidRequest` otherwise."""
    items = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(items, Iterator):
        items = list(items)
    if isinstance(items, bytes | bytearray) or not isinstance(items, Sequence):
        raise _refused(given, field, KINDS)
    return items


def _ids(items: Sequence[Any]) -> tuple[int, ...] | None:
    """`items` as integers; None if some of them are not integers."""
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
