"""Response bodies of chat completions and completions, whole and streamed.

The attribute `header` holds the fields that every body starts with: id, created, model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET

from ramify.messages import Finish, TextChunk, Usage
from ramify.runtime.generation import GenerationResult, ids_in, pieces_of
from ramify.runtime.server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessageReply,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    CompletionTokensDetails,
    Delta,
    FunctionReply,
    Reply,
    ToolCallDelta,
    ToolCallReply,
    UsageReply,
    chat_logprobs,
    choice_extras,
    completion_logprobs,
    usage_reply,
)
from ramify.runtime.server.openai.turn_parser import (
    Turn,
    TurnEvent,
    TurnFormat,
    TurnParser,
    parse_turn,
    parser_of,
)
from ramify.tool_calls.channels import ChannelParser
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning


class ResponseFormatter(Protocol):
    """Makes the bodies of one of the two APIs."""

    def stream_choices(self, index: int, chunk: TextChunk) -> list[Any]:
        """The choice objects for the text of `chunk` of choice `index`. Each is sent in an event of its
        own."""

    def stream_body(self, choices: list[Any], **usage: Any) -> Reply:
        """The body of one stream event."""

    def usage(self, usages: Sequence[Usage], n: int) -> UsageReply:
        """The usage of all streamed choices. Each prompt has `n` consecutive choices."""

    def body(self, results: Sequence[GenerationResult], n: int) -> Reply:
        """The body of a response that is not streamed. Each prompt has `n` consecutive results."""


class ChatFormatter:
    """Makes the bodies of /v1/chat/completions. In a stream, the first event of a choice contains the
    role."""

    def __init__(self, header: dict[str, Any], want_logprobs: bool, turn_format: TurnFormat) -> None:
        self._header = header
        self._want_logprobs = want_logprobs
        self._format = turn_format
        self._parsers: dict[int, TurnParser | ChannelParser] = {}
        self._begun: set[int] = set()
        self._reasoning_tokens = 0

    def stream_choices(self, index: int, chunk: TextChunk) -> list[ChatChunkChoice]:
        parser = self._parsers.setdefault(index, parser_of(self._format))
        thinking = parser.reasoning
        events = parser.push(chunk.text, chunk.controls)
        if thinking:
            self._reasoning_tokens += ids_in(pieces_of(chunk), len(chunk.text) - parser.answered)
        first = index not in self._begun
        extras = choice_extras(chunk)
        if first and not (chunk.text or chunk.finish or chunk.logprobs or extras is not UNSET):
            return []
        self._begun.add(index)
        if chunk.finish is not None:
            events += parser.close()
        deltas = [self._delta(turn_event) for turn_event in events]
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
            choices[-1].finish_reason = _chat_finish(chunk.finish, parser.called)
            choices[-1].matched_stop = chunk.finish.matched
        if choices:
            choices[0 if first else -1].ramify = extras
        return choices

    def usage(self, usages: Sequence[Usage], n: int) -> UsageReply:
        reply = usage_reply(usages, n)
        if self._format.reasoning_end is not None:
            reply.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=self._reasoning_tokens)
        return reply

    def _delta(self, turn_event: TurnEvent) -> Delta:
        match turn_event:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text)
            case CallBegins(index, name):
                assert self._format.tools is not None
                call = ToolCallDelta(
                    index=index,
                    id=self._format.tools.new_id(),
                    type="function",
                    function=FunctionReply(name=name, arguments=""),
                )
            case Arguments(index, text):
                call = ToolCallDelta(index=index, function=FunctionReply(arguments=text))
        return Delta(tool_calls=[call])

    def stream_body(self, choices: list[ChatChunkChoice], **usage: Any) -> ChatChunk:
        return ChatChunk(choices=choices, **self._header, **usage)

    def body(self, results: Sequence[GenerationResult], n: int) -> ChatReply:
        choices = []
        for index, result in enumerate(results):
            finish = _finish(result)
            turn = parse_turn(self._format, result.text, result.controls)
            self._reasoning_tokens += ids_in(result.pieces, len(result.text) - turn.answered)
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
            choices=choices, usage=self.usage([result.usage for result in results], n), **self._header
        )

    def _message(self, turn: Turn) -> ChatMessageReply:
        message = ChatMessageReply(content=turn.content)
        if self._format.reasoning_end is not None and self._format.show_reasoning:
            message.reasoning_content = turn.reasoning
        if turn.calls:
            message.content = turn.content or None
            message.tool_calls = [
                ToolCallReply(id=call.id, function=FunctionReply(name=call.name, arguments=call.arguments))
                for call in turn.calls
            ]
        return message


def _chat_finish(finish: Finish, called: bool) -> str:
    """OpenAI's finish reason for `finish`. It is "tool_calls" for a turn that stopped after complete calls
    (`called`), which waits for their results."""
    return "tool_calls" if called and finish.reason == "stop" else finish.reason


class CompletionFormatter:
    """Makes the bodies of /v1/completions. `echoes` has, for each choice, the prompt to repeat before its
    text, or ""."""

    def __init__(self, header: dict[str, Any], echoes: list[str], want_logprobs: bool) -> None:
        self._header = header
        self._echoes = echoes
        self._want_logprobs = want_logprobs
        self._unsent_echo = dict(enumerate(echoes))

    def stream_choices(self, index: int, chunk: TextChunk) -> list[CompletionChoice]:
        text = self._unsent_echo.pop(index, "") + chunk.text
        prompt, output = ([] if run is None else [run] for run in (chunk.prompt_logprobs, chunk.logprobs))
        extras = choice_extras(chunk)
        if not (text or chunk.finish or prompt or output or extras is not UNSET):
            return []
        choice = CompletionChoice(index=index, text=text)
        if (prompt or output) and self._want_logprobs:
            choice.logprobs = completion_logprobs(prompt, output, self._echoes[index])
        if chunk.finish is not None:
            choice.finish_reason, choice.matched_stop = chunk.finish.reason, chunk.finish.matched
        choice.ramify = extras
        return [choice]

    def stream_body(self, choices: list[CompletionChoice], **usage: Any) -> CompletionReply:
        return CompletionReply(choices=choices, **self._header, **usage)

    def body(self, results: Sequence[GenerationResult], n: int) -> CompletionReply:
        choices = []
        for index, (result, echo) in enumerate(zip(results, self._echoes, strict=True)):
            finish = _finish(result)
            logprobs = None
            if self._want_logprobs:
                logprobs = completion_logprobs(result.prompt_logprobs, result.logprobs, echo)
            choices.append(
                CompletionChoice(
                    index=index,
                    text=echo + result.text,
                    logprobs=logprobs,
                    finish_reason=finish.reason,
                    matched_stop=finish.matched,
                    ramify=choice_extras(result),
                )
            )
        return self.stream_body(choices, usage=self.usage([result.usage for result in results], n))

    def usage(self, usages: Sequence[Usage], n: int) -> UsageReply:
        return usage_reply(usages, n)


def _finish(result: GenerationResult) -> Finish:
    assert result.finish is not None, "a generation ended without a final chunk"
    return result.finish
