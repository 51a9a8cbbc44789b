"""Writes answers of Ollama's API as lines of JSON, while they are generated.

Source: Ollama's API reference. The last line has figures beyond that API in an object named ``ramify``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from ramify.errors import RamifyError
from ramify.messages import TextChunk, Usage, concatenated
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.errors import Problem, ollama_body
from ramify.runtime.server.openai.bodies import Body, chat_logprobs, choice_extras, usage_body
from ramify.runtime.server.openai.turn_parser import TurnEvent, TurnFormat, parser_of
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning


def timestamp(ns: int) -> str:
    """`ns`, nanoseconds since 1970, in the form of RFC 3339."""
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z"


def line(body: Body) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def error_line(error: RamifyError) -> bytes:
    return ollama_body(Problem.of(error)) + b"\n"


class AnswerWriter:
    """Makes the lines of one answer of /api/chat, or with `chat` False of /api/generate."""

    def __init__(self, model: str, turn_format: TurnFormat, *, chat: bool) -> None:
        self._model = model
        self._format = turn_format
        self._chat = chat
        self._parser = parser_of(turn_format)
        self._started = time.perf_counter_ns()
        self._calls: list[tuple[str, list[str]]] = []
        """(name, pieces of the arguments) of each call so far."""
        self._sent_calls = 0
        self._extras: Body = {}
        self.load_ns = 0
        """Time for which the request waited until the model was loaded, in nanoseconds."""

    def push(self, chunk: TextChunk) -> list[Body]:
        """The lines for `chunk`: one for its text, if there is any, and at the end of the answer the last."""
        events = self._parser.push(chunk.text, chunk.controls)
        if chunk.finish is not None:
            events += self._parser.close()
        self._extras |= choice_extras(chunk.violations, chunk.enforcement)
        bodies = []
        text = self._text(events)
        if chunk.logprobs is not None:
            text["logprobs"] = chat_logprobs([chunk.logprobs])
        if text:
            bodies.append(self._body(**text, done=False))
        if chunk.finish is not None:
            figures = self._figures(chunk.usage or Usage())
            bodies.append(self._body(done=True, done_reason=chunk.finish.reason, **figures))
        return bodies

    def whole(self, result: GenerationResult) -> Body:
        """The body of an answer that is not streamed."""
        text, *last = self.push(
            TextChunk(
                rid="",
                text=result.text,
                controls=tuple(result.controls),
                logprobs=concatenated(result.logprobs),
                usage=result.usage,
                finish=result.finish,
                enforcement=result.enforcement,
                violations=result.violations,
            )
        )
        content = "message" if self._chat else "response"
        return text | {name: value for body in last for name, value in body.items() if name != content}

    def loaded(self) -> Body:
        """The answer to a request without a prompt, which loads the model on Ollama."""
        durations: Body = {"total_duration": self.load_ns, "load_duration": self.load_ns}
        return self._body(done=True, done_reason="load", **durations)

    def _text(self, events: Sequence[TurnEvent]) -> Body:
        """The fields for the text and the calls in `events`; empty if there is nothing to send."""
        content, thinking = "", ""
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    thinking += text
                case CallBegins(_, name):
                    self._calls.append((name, []))
                case Arguments(index, text):
                    self._calls[index][1].append(text)
        calls = self._new_calls()
        if not (content or thinking or calls):
            return {}
        body: Body = {"content": content}
        if thinking:
            body["thinking"] = thinking
        if calls:
            body["tool_calls"] = calls
        return body

    def _new_calls(self) -> list[Body]:
        """The calls that are complete and were not sent yet. A call that the end of the output cuts is never
        complete."""
        complete = len(self._calls)
        if complete and not self._parser.called and not _is_object("".join(self._calls[-1][1])):
            complete -= 1
        new = range(self._sent_calls, complete)
        self._sent_calls = max(self._sent_calls, complete)
        return [self._call(index) for index in new]

    def _call(self, index: int) -> Body:
        name, pieces = self._calls[index]
        assert self._format.tools is not None
        # On one line, as the model may write line breaks between the members.
        arguments = msgspec.Raw(msgspec.json.format("".join(pieces).encode(), indent=-1))
        function = {"index": index, "name": name, "arguments": arguments}
        return {"id": self._format.tools.new_id(), "function": function}

    def _body(self, *, content: str = "", **fields: object) -> Body:
        header = {"model": self._model, "created_at": timestamp(time.time_ns())}
        if not self._chat:
            return {**header, "response": content, **fields}
        message: Body = {"role": "assistant", "content": content}
        for name in ("thinking", "tool_calls"):
            if name in fields:
                message[name] = fields.pop(name)
        return {**header, "message": message, **fields}

    def _figures(self, usage: Usage) -> Body:
        """Numbers of tokens, and times in nanoseconds."""
        numbers = usage_body([usage], 1)
        return {
            "total_duration": time.perf_counter_ns() - self._started + self.load_ns,
            "load_duration": self.load_ns,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(usage.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(usage.decode_s),
            "ramify": {**numbers["prompt_tokens_details"], **numbers["ramify"], **self._extras},
        }


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _is_object(text: str) -> bool:
    """Whether `text` is a whole JSON object."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
