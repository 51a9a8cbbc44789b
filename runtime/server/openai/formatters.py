"""How the chat and the completions API write choices, whole and in a stream.

`head` is what every body starts with: id, created, model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET

from ramify.messages import Finish, TextChunk
from ramify.runtime.server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessageReply,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    Delta,
    FunctionReply,
    Reply,
    ToolCallDelta,
    ToolCallReply,
    chat_logprobs,
    choice_extras,
    completion_logprobs,
    usage_reply,
)
from ramify.runtime.server.openai.turn_parser import (
    Reasoning,
    Turn,
    TurnEvent,
    TurnFormat,
    TurnParser,
    parse_turn,
)
from ramify.runtime.server.streams import GenerationResult
from ramify.tool_calls.parser import Arguments, CallBegins, Content


class ResponseFormatter(Protocol):
    """How one of the two APIs writes choices."""

    def parts(self, index: int, chunk: TextChunk) -> list[Any]:
        """What `chunk` adds to choice `index`, as choices of a stream, each for an event of its own."""

    def chunk(self, choices: list[Any], **usage: Any) -> Reply:
        """One event of a stream."""

    def answer(self, results: Sequence[GenerationResult], n: int) -> Reply:
        """The answer in one piece."""


class ChatFormatter:
    """/v1/chat/completions; a choice's first chunk carries the role."""

    def __init__(self, header: dict[str, Any], want_logprobs: bool, form: TurnFormat) -> None:
        self._header = header
        self._want_logprobs = want_logprobs
        self._form = form
        self._readers: dict[int, TurnParser] = {}

    def parts(self, index: int, chunk: TextChunk) -> list[ChatChunkChoice]:
        first = index not in self._readers
        if first:
            if not (chunk.text or chunk.finish or chunk.logprobs):
                return []
            self._readers[index] = TurnParser(self._form)
        reader = self._readers[index]
        found = reader.push(chunk.text)
        if chunk.finish is not None:
            found += reader.close()
        deltas = [self._delta(part) for part in found]
        if not deltas and (first or chunk.finish or (chunk.logprobs and self._want_logprobs)):
            deltas = [Delta()]
        if first:
            deltas[0].role = "assistant"
            if deltas[0].content is UNSET:
                deltas[0].content = None if deltas[0].tool_calls else ""
        choices = [ChatChunkChoice(index=index, delta=delta) for delta in deltas]
        if chunk.logprobs is not None and self._want_logprobs:
            choices[0].logprobs = chat_logprobs([chunk.logprobs])
        if chunk.finish is not None:
            choices[-1].finish_reason = _chat_finish(chunk.finish, reader.called)
            choices[-1].matched_stop = chunk.finish.matched
            choices[-1].ramify = choice_extras(chunk)
        return choices

    def _delta(self, part: TurnEvent) -> Delta:
        match part:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text)
            case CallBegins(index, name):
                assert self._form.tools is not None
                call = ToolCallDelta(
                    index=index,
                    id=self._form.tools.new_id(),
                    type="function",
                    function=FunctionReply(name=name, arguments=""),
                )
            case Arguments(index, text):
                call = ToolCallDelta(index=index, function=FunctionReply(arguments=text))
        return Delta(tool_calls=[call])

    def chunk(self, choices: list[ChatChunkChoice], **usage: Any) -> ChatChunk:
        return ChatChunk(choices=choices, **self._header, **usage)

    def answer(self, results: Sequence[GenerationResult], n: int) -> ChatReply:
        choices = []
        for index, result in enumerate(results):
            finish = _finish(result)
            turn = parse_turn(self._form, result.text)
            choices.append(
                ChatChoice(
                    index=index,
                    message=self._message(turn),
                    logprobs=chat_logprobs(result.logprobs) if self._want_logprobs else None,
                    finish_reason=_chat_finish(finish, turn.called),
                    matched_stop=finish.matched,
                    ramify=choice_extras(result),
                )
            )
        return ChatReply(
            choices=choices, usage=usage_reply([result.usage for result in results], n), **self._header
        )

    def _message(self, turn: Turn) -> ChatMessageReply:
        message = ChatMessageReply(content=turn.content)
        if self._form.reasoning_end is not None and self._form.show_reasoning:
            message.reasoning_content = turn.reasoning
        if turn.calls:
            message.content = turn.content or None
            message.tool_calls = [
                ToolCallReply(id=call.id, function=FunctionReply(name=call.name, arguments=call.arguments))
                for call in turn.calls
            ]
        return message


def _chat_finish(finish: Finish, called: bool) -> str:
    """A turn that ended by itself after whole calls waits for their results."""
    return "tool_calls" if called and finish.reason == "stop" else finish.reason


class CompletionFormatter:
    """/v1/completions; `echoes` is the text that comes before each choice's own."""

    def __init__(self, header: dict[str, Any], echoes: list[str], want_logprobs: bool) -> None:
        self._header = header
        self._echoes = echoes
        self._want_logprobs = want_logprobs
        self._unsent_echo = dict(enumerate(echoes))
        self._offsets = [0] * len(echoes)

    def parts(self, index: int, chunk: TextChunk) -> list[CompletionChoice]:
        text = self._unsent_echo.pop(index, "") + chunk.text
        runs = [run for run in (chunk.prompt_logprobs, chunk.logprobs) if run is not None]
        if not (text or chunk.finish or runs):
            return []
        choice = CompletionChoice(index=index, text=text)
        if runs and self._want_logprobs:
            choice.logprobs = completion_logprobs(runs, self._offsets[index])
            self._offsets[index] += sum(len(token) for token in choice.logprobs.tokens)
        if chunk.finish is not None:
            choice.finish_reason, choice.matched_stop = chunk.finish.reason, chunk.finish.matched
            choice.ramify = choice_extras(chunk)
        return [choice]

    def chunk(self, choices: list[CompletionChoice], **usage: Any) -> CompletionReply:
        return CompletionReply(choices=choices, **self._header, **usage)

    def answer(self, results: Sequence[GenerationResult], n: int) -> CompletionReply:
        choices = []
        for index, (result, echo) in enumerate(zip(results, self._echoes, strict=True)):
            finish = _finish(result)
            runs = result.prompt_logprobs + result.logprobs
            choices.append(
                CompletionChoice(
                    index=index,
                    text=echo + result.text,
                    logprobs=completion_logprobs(runs, 0) if self._want_logprobs else None,
                    finish_reason=finish.reason,
                    matched_stop=finish.matched,
                    ramify=choice_extras(result),
                )
            )
        return self.chunk(choices, usage=usage_reply([result.usage for result in results], n))


def _finish(result: GenerationResult) -> Finish:
    assert result.finish is not None, "a generation ended without a final chunk"
    return result.finish
