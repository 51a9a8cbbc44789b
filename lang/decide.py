"""Decisions: `decide` as a step of a program, and `decide` and `adecide` as calls of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypedDict, TypeVar, Unpack, get_args, overload

from typing_extensions import TypeForm

import ramify.graph as graph
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.backends.base import Backend
from ramify.lang.common.caller import caller_line
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.program.nodes import Decide, ModelStep, RoleBegin, RoleEnd, Row, Text
from ramify.lang.state.state import ProgramState
from ramify.lang.typed.decision import Decision, ModelDecision
from ramify.lang.typed.questions import questions_of
from ramify.messages import ChatMessage
from ramify.questions import LayoutName, Normalisation, OptionEnd
from ramify.spelling import check_word, suggests
from ramify.text import shortened

State = str | Sequence[Mapping[str, Any] | ChatMessage]
"""A text, or the messages of a chat as ``{"role": …, "content": …}``."""
Decisions = dict[str, Decision | ModelDecision]

T = TypeVar("T")
Option = TypeVar("Option", bound=bool | int | str | Enum)
"""Types of one question's options. Any other type has a question for each of its fields."""


class DecideKeywords(TypedDict, total=False):
    """Options of `decide` and `adecide`."""

    layout: LayoutName
    end: OptionEnd
    permutations: int
    normalise: Normalisation
    timeout: float | None
    backend: Backend | str | None
    model: str | None
    priority: int | None
    lora: str | None


class StepKeywords(DecideKeywords, total=False):
    """Options of `decide` as a step."""

    append: bool


@overload
def decide(
    state: State,
    questions: Mapping[str, tuple[Any, str] | type],
    /,
    **options: Unpack[DecideKeywords],
) -> dict[str, Any]: ...
@overload
def decide(
    name: str | None,
    kind: Sequence[T] | Mapping[T, str],
    instructions: str | None = None,
    /,
    **options: Unpack[StepKeywords],
) -> ModelStep[Decision[T]]: ...
@overload
def decide(
    name: str | None,
    kind: None = None,
    instructions: str | None = None,
    /,
    *,
    choices: Sequence[T] | Mapping[T, str],
    **options: Unpack[StepKeywords],
) -> ModelStep[Decision[T]]: ...
@overload
def decide(  # type: ignore[overload-overlap]  # T may be an option as well
    name: str | None,
    kind: TypeForm[Option],
    instructions: str | None = None,
    /,
    **options: Unpack[StepKeywords],
) -> ModelStep[Decision[Option]]: ...
@overload
def decide(
    name: str | None,
    kind: TypeForm[T],
    instructions: str | None = None,
    /,
    **options: Unpack[StepKeywords],
) -> ModelStep[ModelDecision[T]]: ...
@suggests
def decide(
    name: Any,
    kind: Any = None,
    instructions: str | None = None,
    /,
    *,
    choices: Sequence[Any] | Mapping[Any, str] | None = None,
    append: bool = False,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    model: str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> Any:
    """Answer typed questions by the probabilities of their options. Nothing is generated.

        s += rm.decide("urgent", bool, "Is it urgent?")              a step of a program
        s += rm.decide("team", ["billing", "returns"], "Whose is it?")
        if s["urgent"].value: ...

        found = rm.decide(text, {"urgent": (bool, "Is it urgent?")})  a call, outside of programs or inside
        found["urgent"].probabilities[True]

    As a step, it sets the variable `name` to a `Decision`. The question is asked behind the content of the
    branch, and never becomes a part of it. In a chat, it goes on in the user turn that is open or has just
    ended, else in a new user turn. Behind text without turns it is asked in plain text. Decisions that are
    appended in a row to one branch, with the same options, are one request; they wait at most 10 ms for the
    next, and not at all if the program reads a result or appends another step.

    As a call, `decide(state, questions)` asks about a text or about chat messages, and returns a mapping from
    names to decisions. Its `questions` are a mapping from names to types or to pairs (type, instructions).
    Such a mapping as the second argument makes a call, anything else a step: the text of a state decides
    nothing. A step's `name` is a Python identifier or None.

    Args:
        kind: bool; a `Literal` or an Enum; a list of options, or a mapping from options to descriptions;
            ``Annotated[int, rm.Levels("low", "mid", "high")]``; or a pydantic model, dataclass or TypedDict,
            each of whose fields is one question with the field's description as its instructions. A type may
            be annotated with a mapping from its options to descriptions.
        instructions: The question. A bool needs one, and so does a mapping from texts to descriptions.
        choices: The options in place of `kind`, as `select` names them.
        append: Append the text of the value: the name of the option or level, ``True`` or ``False``.
        layout: "auto", "verbatim", "labels", "isolated" or "trained" (`ramify.questions.LayoutName`).
        end: The event that an option ends: "prefix", or "turn" (`ramify.questions.OptionEnd`).
        permutations: Number of orders of the options, over which the probabilities are averaged.
        normalise: "sum", "mean", or "pmi", which asks behind an empty state as well
            (`ramify.questions.Normalisation`).
        timeout, backend, model, priority, lora: The same as for `gen`.

    Raises `InvalidRequest` for wrong options, and `UnsupportedField` for a type that is no question.
    """
    line = caller_line()
    options: dict[str, Any] = {
        "layout": layout,
        "end": end,
        "permutations": permutations,
        "normalise": normalise,
        "timeout": timeout,
        "priority": priority,
        "lora": lora,
    }
    if not isinstance(kind, Mapping) or _are_options(kind):
        if choices is not None and kind is not None:
            raise InvalidRequest("A decide has kind or choices, not both.", field="choices")
        _check_step(name, kind, instructions)
        kind = list(choices) if isinstance(choices, tuple) else kind if choices is None else choices
        return _step(name, kind, instructions, line, append=append, backend=backend, model=model, **options)
    for field, value in (("instructions", instructions), ("choices", choices), ("append", append or None)):
        if value is not None:
            raise UnsupportedField(f"decide(state, questions) has no {field}.", field=field)
    turns, steps = _turns(name), _steps(kind, line, options)
    state = Function(decisions).run(turns, steps, backend=backend, model=model)
    return state.ret_value


@suggests
async def adecide(
    state: State,
    questions: Mapping[str, Any],
    /,
    *,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    model: str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> dict[str, Any]:
    """Answer questions about a state as ``decide(state, questions)`` does, in the caller's event loop."""
    options: dict[str, Any] = {
        "layout": layout,
        "end": end,
        "permutations": permutations,
        "normalise": normalise,
        "timeout": timeout,
        "priority": priority,
        "lora": lora,
    }
    turns, steps = _turns(state), _steps(questions, caller_line(), options)
    done = await AsyncFunction(adecisions).run(turns, steps, backend=backend, model=model)
    return done.ret_value


def _are_options(kind: Mapping[Any, Any]) -> bool:
    """Whether a mapping is one from options to descriptions, not from names to questions."""
    return bool(kind) and all(isinstance(about, str | None) for about in kind.values())


def _check_step(name: Any, kind: Any, instructions: str | None) -> None:
    """Refuse the arguments of a step that may be meant as those of a call."""
    if isinstance(kind, Mapping) and instructions is None and all(isinstance(one, str) for one in kind):
        first, about = next(iter(kind.items()))
        raise InvalidRequest(
            f"decide has the mapping {shortened(repr(kind), 80)}, which may be questions or options.",
            field="kind",
            remedy=f"Write a question as a pair: {{{first!r}: (bool, {about!r})}}. Options of a step need "
            "instructions: decide(name, options, instructions).",
        )
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise InvalidRequest(
            f"decide has the name {shortened(repr(name), 80)}, which is no Python identifier.",
            field="name",
            remedy="To ask about a text or messages, write decide(state, {name: (type, instructions)}).",
        )


def _step(
    name: str | None,
    kind: Any,
    instructions: str | None,
    line: str | None,
    *,
    backend: Backend | str | None = None,
    **options: Any,
) -> Decide:
    """The step with these `options`: fields of `graph.Decide`."""
    if kind is None:
        raise InvalidRequest("decide needs a type or choices.", field="kind")
    for field, words in (("layout", LayoutName), ("end", OptionEnd), ("normalise", Normalisation)):
        check_word(field, options[field], get_args(words))
    found = questions_of(kind, instructions, name or "")
    asked = found if isinstance(found, dict) else {"": found}
    node = graph.Decide(
        name=name,
        question=None if isinstance(found, dict) else found.question,
        fields={field: one.question for field, one in found.items()} if isinstance(found, dict) else {},
        **options,
    )
    kind = kind if isinstance(found, dict) else None
    return Decide(node.checked(), asked, kind, backend=backend, line=line)


def _steps(questions: Any, line: str | None, options: Mapping[str, Any]) -> dict[str, Decide]:
    """The steps of a call, by name."""
    if not isinstance(questions, Mapping):
        raise InvalidRequest(
            f"The questions are {questions!r}; they are a mapping from names to types or to pairs (type, "
            "instructions).",
            field="questions",
        )
    if not questions:
        raise InvalidRequest("There are no questions.", field="questions")
    steps = {}
    for name, asked in questions.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"A question is named {name!r}; a name is a text.", field="questions")
        kind, instructions = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, None)
        steps[name] = _step(name, kind, instructions, line, **options)
    return steps


def _turns(state: Any) -> list[tuple[str, str]]:
    """(role, text) of each turn; the role of a bare text is empty."""
    if isinstance(state, str):
        return [("", state)]
    if not isinstance(state, Sequence):
        raise InvalidRequest(f"The state is {state!r}; it is a text or a list of messages.", field="state")
    turns = []
    for place, message in enumerate(state):
        if isinstance(message, ChatMessage):
            message = {"role": message.role, "content": message.content}
        known = isinstance(message, Mapping) and message.keys() == {"role", "content"}
        if not known or not all(isinstance(value, str) for value in message.values()):
            raise UnsupportedField(
                f"The message is {message!r}; it has a role and a content, both text.",
                field=f"state[{place}]",
            )
        turns.append((message["role"], message["content"]))
    return turns


def decisions(s: ProgramState, turns: list[tuple[str, str]], steps: dict[str, Decide]) -> Decisions:
    _append(s, turns, steps)
    return {name: s[name] for name in steps}


async def adecisions(s: ProgramState, turns: list[tuple[str, str]], steps: dict[str, Decide]) -> Decisions:
    _append(s, turns, steps)
    return {name: await s.aget(name) for name in steps}


def _append(s: ProgramState, turns: list[tuple[str, str]], steps: dict[str, Decide]) -> None:
    """Append the state and the steps. A bare text is a user turn, unless the model has no chat template."""
    chats = s._branch.run.info.chat_format is not None
    for role, text in turns:
        role = role or ("user" if chats else "")
        s += Row((RoleBegin(role), Text(text), RoleEnd(role))) if role else text
    s += Row(tuple(steps.values()))
