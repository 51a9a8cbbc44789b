"""The tree of calls of one program run: what each call cost, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ramify.lang.prompt.transcript import Piece, text_of
from ramify.lang.trace.outputs import Tokens, add_usage
from ramify.lang.typed.decision import Decision
from ramify.messages import ChoiceScore, Finish, TokenLogprobs, Usage
from ramify.questions import Question

if TYPE_CHECKING:
    from ramify.lang.tools.forms import TaggedCalls
    from ramify.lang.trace.misses import Misses

CallKind = Literal[
    "program", "fork", "gen", "select", "decide", "tool", "recover", "sample", "attempt", "prior"
]
"""The kind of a call. program and fork: containers of other calls. gen, select and decide: steps of the
program. tool: a call of a function by the model; not a request. recover: a `ProgramState.recover`, named like
the step that had failed; not a request. The children of a step that makes several requests, one for each
request: sample (n > 1), attempt (retries > 0), and for a decide with "pmi" sample and prior (the questions
behind an empty state)."""


@dataclass(slots=True)
class Failure:
    """A transient failure of a request, after which the request was sent again. Times are in seconds since
    the outermost program began."""

    error: str
    start_s: float
    """The time at which the request that failed was sent."""
    end_s: float
    """The time of the failure."""
    again_s: float
    """The time at which the request was sent again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """A program, a branch, a step, or one request of a step. Times are in seconds since the outermost program
    began."""

    kind: CallKind
    name: str
    line: str | None = None
    """file:line of the `gen` or `select`."""
    start_s: float = 0.0
    end_s: float | None = None
    """The time of the end; None while the call runs."""
    own_usage: Usage = field(default_factory=Usage)
    """The usage of this request alone, without its children and without attempts that broke off."""
    broken_usage: Usage = field(default_factory=Usage)
    """The usage of the attempts that broke off before the last attempt, as far as that usage is known."""
    stored: bool = False
    """Whether the answer came from a store of answers, without a request."""
    failures: list[Failure] = field(default_factory=list)
    """The transient failures of the request, after each of which it was sent again."""
    first_text_s: float | None = None
    followed: bool = False
    """Whether the text is streamed while it is generated."""
    text: str = ""
    """The text generated so far. For a select: the choice. For a decide: the text of its value. For a tool:
    the result that the model is shown. For a recover: the error of the step that had failed."""
    thinking: str | None = None
    """The thoughts before `text`; None if the step has no setting of thinking."""
    before: str = ""
    """The output before `text`: the thoughts and the marks after them."""
    arguments: str | None = None
    """The arguments of a call of a tool, as the JSON text that the model wrote."""
    model: str = ""
    """The name of the request's backend in the run's `Router`; without a router, the name of the model."""
    finish: Finish | None = None
    error: str | None = None
    tokens: Tokens | None = field(default=None, repr=False)
    """The tokens of `before` and `text`."""
    scores: TokenLogprobs | None = field(default=None, repr=False)
    """Log-probabilities of the prompt's last tokens; None if they were not requested."""
    choices: tuple[tuple[str, ChoiceScore], ...] = field(default=(), repr=False)
    """The choices of a select and their scores."""
    asked: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    """The name and the fields of each step whose questions are in this request; the field of a single
    question is empty."""
    merged: bool = False
    """Whether the step's questions were in the request of an earlier step."""
    decisions: tuple[tuple[str, Decision], ...] = field(default=(), repr=False)
    """The fields of a decide and their decisions."""
    questions: tuple[Question, ...] = field(default=(), repr=False)
    """The question of each of `decisions`."""
    form: TaggedCalls | None = field(default=None, repr=False)
    """The form of the step's tool calls; None in a step that calls no tools."""
    dropped: tuple[Call, ...] = field(default=(), repr=False)
    """For a recover: the steps and the calls of tools that it removed from the content, the failed one
    included."""
    priority: int | None = None
    """The priority that the step sets."""
    lora: str | None = None
    """The LoRA adapter that the step sets."""
    children: list[Call] = field(default_factory=list)
    prompt_end: Piece | None = field(default=None, repr=False)
    parent: Call | None = field(default=None, repr=False)
    span: Any = field(default=None, repr=False)
    """The span of OpenTelemetry; None before and after it, and while spans are off."""

    def child(
        self, kind: CallKind, name: str, prompt_end: Piece | None, start_s: float, *, line: str | None = None
    ) -> Call:
        """Add a new call below this one, and return it."""
        call = Call(kind, name, line or self.line, start_s, prompt_end=prompt_end, parent=self)
        call.priority, call.lora = self.priority, self.lora
        self.children.append(call)
        return call

    @property
    def output(self) -> str:
        """The whole generated text, thoughts included. Empty for a decide, which generates nothing."""
        return "" if self.asked else self.before + self.text

    @property
    def resent(self) -> int:
        """Number of times that the request was sent again after a transient failure."""
        return len(self.failures)

    @property
    def phases(self) -> dict[str, float] | None:
        """Seconds that the request waited for its grammar (``grammar_s``) and in the queue (``queue_s``), and
        in which its prompt was computed (``prefill_s``) and its output generated (``decode_s``). After
        transient failures, those of the last request.

        None for a call that is no request, has not ended, or was answered by a backend that reports no times.
        """
        return self.own_usage.phases if self.end_s is not None and self.sent else None

    @property
    def dropped_usage(self) -> Usage:
        """The usage of the calls that a recover dropped."""
        return reduce(add_usage, [call.usage for call in self.dropped], Usage())

    @property
    def spent(self) -> Usage:
        """The usage of this request with all its attempts, without its children."""
        return add_usage(self.own_usage, self.broken_usage) if self.resent else self.own_usage

    @property
    def usage(self) -> Usage:
        """The usage of this call and all calls below it."""
        total = self.spent
        for child in self.children:
            total = add_usage(total, child.usage)
        return total

    @property
    def usage_by_model(self) -> dict[str, Usage]:
        """Model → usage of the requests below this call, in program order of first use."""
        found: dict[str, Usage] = {}
        for call in self.walk():
            if call.sent:
                found[call.model] = add_usage(found.get(call.model, Usage()), call.spent)
        return found

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not found in the cache."""
        usage = self.usage
        return usage.prompt_tokens - usage.cached_tokens

    @property
    def tokens_of_prompt(self) -> int | None:
        """Number of tokens of `prompt`, without the tokens of scored choices. None for a decide, whose usage
        counts its questions as well."""
        if self.asked:
            return None
        inner = {
            score.tokens.ids[:end] for _, score in self.choices for end in range(1, len(score.tokens.ids))
        }
        alone = any(score.unconditional is not None for _, score in self.choices)
        return self.own_usage.prompt_tokens - len(inner) * (1 + alone)

    @property
    def prompt(self) -> str:
        """The exact text of the prompt that was sent."""
        return text_of(self.prompt_end)

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the calls on the path from the program to this call, without the program."""
        names: list[str] = []
        call = self
        while call.parent is not None and call.kind != "program":
            names.append(label_of(call).rstrip())
            call = call.parent
        return tuple(reversed(names))

    @property
    def place(self) -> str:
        """The child indices on the path from the program to this call, such as ``0.2``. They are the same in
        every run of a graph."""
        places: list[str] = []
        call = self
        while call.parent is not None and call.kind != "program":
            places.append(str(call.parent.children.index(call)))
            call = call.parent
        return ".".join(reversed(places))

    @property
    def sent(self) -> bool:
        """Whether this call is itself a request to the backend."""
        steps = self.kind not in ("program", "fork", "tool", "recover") and not self.merged
        return steps and not self.children and not self.stored

    @property
    def requests(self) -> int:
        """The number of requests that this call and all calls below it have sent to the backend."""
        return self.sent + sum(child.requests for child in self.children)

    @property
    def duration_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.start_s

    def shift(self, seconds: float) -> None:
        """Add `seconds` to all times of this call, without those of its children."""
        self.start_s += seconds
        self.end_s = None if self.end_s is None else self.end_s + seconds
        self.first_text_s = None if self.first_text_s is None else self.first_text_s + seconds
        for failure in self.failures:
            failure.start_s += seconds
            failure.end_s += seconds
            failure.again_s += seconds

    def walk(self) -> Iterator[Call]:
        """Yield this call and all calls below it, in program order."""
        yield self
        for child in self.children:
            yield from child.walk()

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain data, for JSON. ``miss`` is the reason why a request had to compute tokens of its
        prompt."""
        from ramify.lang.trace.misses import Misses

        by_model = {model: msgspec.to_builtins(usage) for model, usage in self.usage_by_model.items()}
        return {**self._to_dict(Misses(self)), "usage_by_model": by_model}

    def _to_dict(self, misses: Misses) -> dict[str, Any]:
        usage, miss = self.usage, misses.why.get(self)
        return {
            "kind": self.kind,
            "name": self.name,
            "line": self.line,
            "model": self.model or None,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "phases": self.phases,
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            **{name: getattr(usage, name) for name in COUNTS},
            "arguments": self.arguments,
            "stored": self.stored,
            "resent": self.resent,
            "failures": [asdict(failure) for failure in self.failures],
            "dropped": [call.place for call in self.dropped],
            "text": self.text,
            "thinking": self.thinking,
            "decisions": {field: one.to_dict() for field, one in self.decisions},
            "merged": self.merged,
            "finish_reason": self.finish.reason if self.finish else None,
            "error": self.error,
            "miss": None if miss is None else miss.to_dict(),
            "children": [child._to_dict(misses) for child in self.children],
        }

    def __repr__(self) -> str:
        from ramify.lang.trace.tree import render

        return render(self)

    def _repr_html_(self) -> str:
        from ramify.lang.trace.html import call_html

        return call_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tree as one HTML file, which loads no other files."""
        from ramify.lang.trace.report import report

        Path(path).write_text(report(self), encoding="utf-8", errors="backslashreplace")


COUNTS = [name for name in Usage.__struct_fields__ if name.endswith("_tokens")]

CURRENT: ContextVar[Call | None] = ContextVar("ramify_call", default=None)
"""The call for which the method `generate` of a backend is running. A scripted backend looks up its answer by
the name of this call."""


def label_of(call: Call) -> str:
    return call.name if call.kind in ("program", "fork") else f"{call.kind} {call.name}"


def decided(call: Call) -> str:
    """The values of a decide with their probabilities, such as ``billing 0.64 (confidence 0.46, option mass
    0.003)``; with fields, ``urgent True 0.91 (…), team billing 0.64 (…)``."""
    return ", ".join([f"{field} {_decision(one)}".lstrip() for field, one in call.decisions])


def _decision(one: Decision) -> str:
    mass = "" if one.option_mass is None else f", option mass {one.option_mass:.2g}"
    return f"{one.text} {one.probabilities[one.value]:.2f} (confidence {one.confidence:.2f}{mass})"
