"""Response bodies of chat completions and completions, whole and streamed (OpenAI's API reference)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ramify.messages import Finish, TextChunk, TokenLogprobs, Usage
from ramify.runtime.generation import GenerationResult, ids_in, pieces_of
from ramify.runtime.server.openai.bodies import (
    Body,
    chat_logprobs,
    choice_extras,
    completion_logprobs,
    usage_body,
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


class ResponseFormatter(ABC):
    """Makes the bodies of one of the two APIs. `header` has the fields that every body starts with: id,
    created, model."""

    kind: str
    """The value of ``object`` in stream events."""

    def __init__(self, header: Body, want_logprobs: bool) -> None:
        self._header = header
        self._want_logprobs = want_logprobs
        self.timings_per_token = False
        """Whether every event of a stream tells its times, not only the last."""

    @abstractmethod
    def stream_choices(self, index: int, chunk: TextChunk) -> list[Body]:
        """The choice objects for the text of `chunk` of choice `index`: one for each event to send."""

    def stream_body(self, choices: list[Body]) -> Body:
        """The body of one stream event."""
        return {**self._header, "object": self.kind, "choices": choices}

    def usage(self, usages: Sequence[Usage], n: int) -> Body:
        """The usage of all streamed choices. Each prompt has `n` consecutive choices."""
        return usage_body(usages, n)

    @abstractmethod
    def body(self, results: Sequence[GenerationResult], n: int) -> Body:
        """The body of a response that is not streamed. Each prompt has `n` consecutive results."""


class ChatFormatter(ResponseFormatter):
    """Makes the bodies of /v1/chat/completions. In a stream, the first event of a choice has the role."""

    kind = "chat.completion.chunk"

    def __init__(self, header: Body, want_logprobs: bool, turn_format: TurnFormat) -> None:
        super().__init__(header, want_logprobs)
        self._format = turn_format
        self._parsers: dict[int, TurnParser | ChannelParser] = {}
        self._begun: set[int] = set()
        self._custom: set[tuple[int, int]] = set()
        """(choice, call) of each call of a custom tool."""
        self._reasoning_tokens = 0

    def stream_choices(self, index: int, chunk: TextChunk) -> list[Body]:
        parser = self._parsers.setdefault(index, parser_of(self._format))
        thinking = parser.reasoning
        events = parser.push(chunk.text, chunk.controls)
        if thinking:
            self._reasoning_tokens += ids_in(pieces_of(chunk), len(chunk.text) - parser.answered)
        first = index not in self._begun
        extras = choice_extras(chunk.violations, chunk.enforcement)
        if first and not (chunk.text or chunk.finish or chunk.logprobs or extras):
            return []
        self._begun.add(index)
        if chunk.finish is not None:
            events += parser.close()
        deltas = [self._delta(index, turn_event) for turn_event in events]
        if not deltas and (first or chunk.finish or (chunk.logprobs and self._want_logprobs)):
            deltas = [{}]
        if first:
            deltas[0]["role"] = "assistant"
            deltas[0].setdefault("content", None if "tool_calls" in deltas[0] else "")
        choices: list[Body] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if chunk.logprobs is not None and self._want_logprobs:
            choices[0]["logprobs"] = _logprobs([chunk.logprobs])
        if chunk.finish is not None:
            choices[-1]["finish_reason"] = _chat_finish(chunk.finish, parser.called)
            choices[-1]["matched_stop"] = chunk.finish.matched
        if choices and extras:
            choices[0 if first else -1]["ramify"] = extras
        return choices

    def usage(self, usages: Sequence[Usage], n: int) -> Body:
        body = super().usage(usages, n)
        if self._format.reasoning_end is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens}
        return body

    def _delta(self, index: int, turn_event: TurnEvent) -> Body:
        """The delta of choice `index` for an event."""
        match turn_event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegins(call, name, custom):
                assert self._format.tools is not None
                if custom:
                    self._custom.add((index, call))
                begun = {"index": call, "id": self._format.tools.new_id(), **_call(name, "", custom=custom)}
                return {"tool_calls": [begun]}
            case Arguments(call, text):
                more = {"custom": {"input": text}} if (index, call) in self._custom else None
                return {"tool_calls": [{"index": call, **(more or {"function": {"arguments": text}})}]}

    def body(self, results: Sequence[GenerationResult], n: int) -> Body:
        choices = []
        for index, result in enumerate(results):
            finish = _finish(result)
            turn = parse_turn(self._format, result.text, result.controls)
            self._reasoning_tokens += ids_in(result.pieces, len(result.text) - turn.answered)
            choice: Body = {
                "index": index,
                "message": self._message(turn),
                "logprobs": _logprobs(result.logprobs) if self._want_logprobs else None,
                "finish_reason": _chat_finish(finish, turn.called),
                "matched_stop": finish.matched,
            }
            choices.append(_with_extras(choice, result))
        usage = self.usage([result.usage for result in results], n)
        return {**self._header, "object": "chat.completion", "choices": choices, "usage": usage}

    def _message(self, turn: Turn) -> Body:
        message: Body = {"role": "assistant", "content": turn.content, "refusal": None}
        if self._format.reasoning_end is not None and self._format.show_reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["content"] = turn.content or None
            message["tool_calls"] = [
                {"id": call.id, **_call(call.name, call.arguments, custom=call.name in self._format.texts)}
                for call in turn.calls
            ]
        return message


class CompletionFormatter(ResponseFormatter):
    """Makes the bodies of /v1/completions. `echoes` has, for each choice, the prompt to repeat before its
    text, or ""."""

    kind = "text_completion"

    def __init__(self, header: Body, want_logprobs: bool, echoes: list[str]) -> None:
        super().__init__(header, want_logprobs)
        self.echoes = echoes
        self._echoed: set[int] = set()

    def stream_choices(self, index: int, chunk: TextChunk) -> list[Body]:
        text = chunk.text if index in self._echoed else self.echoes[index] + chunk.text
        self._echoed.add(index)
        prompt, output = ([] if run is None else [run] for run in (chunk.prompt_logprobs, chunk.logprobs))
        choice = _with_extras({"index": index, "text": text, "logprobs": None, "finish_reason": None}, chunk)
        if not (text or chunk.finish or prompt or output or "ramify" in choice):
            return []
        if (prompt or output) and self._want_logprobs:
            choice["logprobs"] = completion_logprobs(prompt, output, self.echoes[index])
        if chunk.finish is not None:
            choice["finish_reason"], choice["matched_stop"] = chunk.finish.reason, chunk.finish.matched
        return [choice]

    def body(self, results: Sequence[GenerationResult], n: int) -> Body:
        choices = []
        for index, (result, echo) in enumerate(zip(results, self.echoes, strict=True)):
            finish = _finish(result)
            logprobs = None
            if self._want_logprobs:
                logprobs = completion_logprobs(result.prompt_logprobs, result.logprobs, echo)
            choice: Body = {
                "index": index,
                "text": echo + result.text,
                "logprobs": logprobs,
                "finish_reason": finish.reason,
                "matched_stop": finish.matched,
            }
            choices.append(_with_extras(choice, result))
        return self.stream_body(choices) | {"usage": self.usage([result.usage for result in results], n)}


def _call(name: str, arguments: str, *, custom: bool) -> Body:
    """A call without its id. The arguments of a `custom` tool are its input."""
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _chat_finish(finish: Finish, called: bool) -> str:
    """OpenAI's finish reason for `finish`. With `called` (the turn has complete calls), "tool_calls" takes
    the place of "stop"."""
    return "tool_calls" if called and finish.reason == "stop" else finish.reason


def _logprobs(runs: Sequence[TokenLogprobs]) -> Body:
    return {"content": chat_logprobs(runs), "refusal": None}


def _with_extras(choice: Body, outcome: TextChunk | GenerationResult) -> Body:
    extras = choice_extras(outcome.violations, outcome.enforcement)
    return {**choice, "ramify": extras} if extras else choice


def _finish(result: GenerationResult) -> Finish:
    assert result.finish is not None, "a generation ended without a final chunk"
    return result.finish
