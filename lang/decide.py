"""Decisions: `decide` as a step of a program, and `decide` and `adecide` as calls of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, overload

import ramify.graph as graph
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.backends.base import Backend
from ramify.lang.common.caller import caller_line
from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.program.nodes import Decide, Node, RoleBegin, RoleEnd, Row, Text
from ramify.lang.state.state import ProgramState
from ramify.lang.typed.adapters import members_of
from ramify.lang.typed.decision import Decision, ModelDecision
from ramify.lang.typed.questions import questions_of
from ramify.messages import ChatMessage
from ramify.questions import LayoutName, Normalisation, OptionEnd
from ramify.spelling import check_word, suggests

State = str | Sequence[Mapping[str, Any] | ChatMessage]
"""A text, or the messages of a chat as ``{"role": …, "content": …}``."""
Decisions = Mapping[str, Decision | ModelDecision]


@overload
def decide(
    state: State,
    questions: Mapping[str, tuple[Any, str] | type],
    /,
    *,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> dict[str, Any]: ...
@overload
def decide(
    name_or_state: State | None,
    kind: type,
    /,
    *,
    append: bool = False,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> Any: ...
@overload
def decide(
    name: str | None,
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
    priority: int | None = None,
    lora: str | None = None,
) -> Node: ...
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
    appended in a row to one branch, with the same options, are one request; a decision waits at most 10 ms
    for more of them, and not at all if the program reads a result or appends another step.

    As a call, `decide(state, questions)` asks about a text or about chat messages, and returns a mapping from
    names to decisions. Its `questions` are a mapping from names to types or to pairs (type, instructions), or
    a type with fields. With a type with fields, the first argument is the name of a variable if it is a
    Python identifier, else a state.

    Args:
        kind: bool; a `Literal` or an Enum; a list of options, or a mapping from options to descriptions;
            ``Annotated[int, rm.Levels("low", "mid", "high")]``; or a pydantic model, dataclass or TypedDict,
            each of whose fields is one question with the field's description as its instructions. A type may
            be annotated with a mapping from its options to descriptions.
        instructions: The question. A bool needs one.
        choices: The options in place of `kind`, as `select` names them.
        append: Append the text of the value: the name of the option, the number of the level, ``True`` or
            ``False``.
        layout: "auto", "verbatim", "labels", "isolated" or "trained" (`ramify.questions.LayoutName`).
        end: The event that an option ends: "prefix", or "turn" (`ramify.questions.OptionEnd`).
        permutations: Number of orders of the options, over which the probabilities are averaged.
        normalise: "sum", "mean", or "pmi", which asks behind an empty state as well
            (`ramify.questions.Normalisation`).
        timeout, backend, priority, lora: The same as for `gen`.

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
    if _is_step(name, kind):
        if choices is not None and kind is not None:
            raise InvalidRequest("A decide has kind or choices, not both.", field="choices")
        kind = list(choices) if isinstance(choices, tuple) else kind if choices is None else choices
        return _step(name, kind, instructions, line, append=append, backend=backend, **options)
    for field, value in (("instructions", instructions), ("choices", choices), ("append", append or None)):
        if value is not None:
            raise UnsupportedField(f"decide(state, questions) has no {field}.", field=field)
    turns, steps = _turns(name), _steps(kind, line, options)
    state = Function(decisions).run(turns, steps, backend=backend)
    return state.ret_value


@suggests
async def adecide(
    state: State,
    questions: Mapping[str, Any] | type,
    /,
    *,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> Any:
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
    done = await AsyncFunction(adecisions).run(turns, steps, backend=backend)
    return done.ret_value


def _is_step(name: Any, kind: Any) -> bool:
    if not isinstance(name, str | None):
        return False
    if isinstance(kind, Mapping):
        return bool(kind) and all(isinstance(about, str | None) for about in kind.values())
    return name is None or members_of(kind) is None or name.isidentifier()


def _step(
    name: str | None,
    kind: Any,
    instructions: str | None,
    line: str | None,
    *,
    append: bool = False,
    layout: LayoutName = "auto",
    end: OptionEnd = "prefix",
    permutations: int = 1,
    normalise: Normalisation = "sum",
    timeout: float | None = None,
    backend: Backend | str | None = None,
    priority: int | None = None,
    lora: str | None = None,
) -> Decide:
    if kind is None:
        raise InvalidRequest("decide needs a type or choices.", field="kind")
    for field, word, words in (
        ("layout", layout, LayoutName),
        ("end", end, OptionEnd),
        ("normalise", normalise, Normalisation),
    ):
        check_word(field, word, get_args(words))
    found = questions_of(kind, instructions, name or "")
    asked = found if isinstance(found, dict) else {"": found}
    node = graph.Decide(
        name=name,
        question=None if isinstance(found, dict) else found.question,
        fields={field: one.question for field, one in found.items()} if isinstance(found, dict) else {},
        append=append,
        layout=layout,
        end=end,
        permutations=permutations,
        normalise=normalise,
        timeout=timeout,
        priority=priority,
        lora=lora,
    )
    kind = kind if isinstance(found, dict) else None
    return Decide(node.checked(), asked, kind, backend=backend, line=line)


ANSWER = "answer"
"""The name of the step for a type with fields."""


def _steps(questions: Any, line: str | None, options: Mapping[str, Any]) -> dict[str, Decide]:
    """The steps of a call, by name; a single step without a name for a type with fields."""
    if not isinstance(questions, Mapping):
        if members_of(questions) is None:
            raise InvalidRequest(
                f"The questions are {questions!r}; they are a mapping from names to types, or a type with "
                "fields.",
                field="questions",
            )
        return {"": _step(ANSWER, questions, None, line, **options)}
    if not questions:
        raise InvalidRequest("There are no questions.", field="questions")
    steps = {}
    for name, asked in questions.items():
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
    return _whole({name: s[name or ANSWER] for name in steps})


async def adecisions(s: ProgramState, turns: list[tuple[str, str]], steps: dict[str, Decide]) -> Decisions:
    _append(s, turns, steps)
    return _whole({name: await s.aget(name or ANSWER) for name in steps})


def _whole(found: dict[str, Any]) -> Decisions:
    decisions: Decisions = found.get("", found)
    return decisions


def _append(s: ProgramState, turns: list[tuple[str, str]], steps: dict[str, Decide]) -> None:
    """Append the state and the steps. A bare text is a user turn, unless the model has no chat template."""
    chats = s._branch.run.info.chat_format is not None
    for role, text in turns:
        role = role or ("user" if chats else "")
        s += Row((RoleBegin(role), Text(text), RoleEnd(role))) if role else text
    s += Row(tuple(steps.values()))
