"""Conditions and bounded loops, which a compiled program has as nodes with conditions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ramify.errors import InvalidRequest
from ramify.lang.graph.recorder import RecordedBranch
from ramify.lang.graph.symbolic import Symbolic, SymbolicDecision, SymbolicText, SymbolicValue, refuse
from ramify.lang.program.nodes import Guard, Guarded, Node, ResultRef, Row, as_node
from ramify.lang.state.state import ProgramState
from ramify.lang.typed.decision import Decision
from ramify.spelling import nearest, suggests

Outcome = str | bool | int


@suggests
def when(value: Any, cases: Mapping[Outcome, str | Node], default: str | Node | None = None) -> Node:
    """The item of `cases` that `value` chooses, as a node to append.

        s += rm.user("A bug or a question?") + rm.assistant(rm.select("kind", ["bug", "question"]))
        s += rm.when(s["kind"], {"bug": rm.user("Which version?") + rm.assistant(rm.gen("version"))})

    Args:
        value: The result of a `select` or `decide`, a field of type str, bool or Literal, or an argument.
            ``str(value)`` is compared with ``str(case)``: of a decision with levels, the name of the level.
            In a compiled program the server compares.
        cases: Value → the text or node to append.
        default: The text or node to append for any other value; None appends nothing.

    Reading a variable fails if the only steps that set the variable belong to cases that were not chosen.
    Raises `InvalidRequest` for a case that is no str, bool or int, for two cases with the same text, and for
    a case that is no option of the decision `value`.
    """
    texts = [str(case) for case in cases]
    for case in cases:
        if type(case) not in (str, bool, int) or texts.count(str(case)) > 1:
            raise InvalidRequest(
                f"The case {case!r} is no str, bool or int, or reads like another.", field="cases"
            )
    if issubclass(type(value), Decision | SymbolicDecision):
        for text in texts:
            if text not in value.texts:
                raise InvalidRequest(
                    f"The case {text!r} is no option of the decision, which has "
                    f"{', '.join(map(repr, value.texts))}.",
                    field="cases",
                    remedy=nearest(text, value.texts),
                )
    source = _source(value)
    if source is None:
        chosen = next((item for case, item in cases.items() if str(case) == str(value)), default)
        return Row(()) if chosen is None else as_node(chosen)
    steps: list[Guarded] = []
    for case, item in cases.items():
        steps += _guarded(as_node(item), Guard(source, (str(case),)))
    if default is not None:
        steps += _guarded(as_node(default), Guard(source, tuple(map(str, cases)), negated=True))
    return Row(tuple(steps))


@suggests
def repeat(s: ProgramState, body: Callable[[ProgramState], Any], *, until: Any, at_most: int) -> Any:
    """Call ``body(s)``, which appends to `s`, until it returns `until`, but at most `at_most` times.

        def improve(s):
            s += rm.user("Improve it.") + rm.assistant(rm.gen("draft"))
            s += rm.user("Good enough?") + rm.assistant(rm.select("good", ["yes", "no"]))
            return s["good"]

        rm.repeat(s, improve, until="yes", at_most=3)

    Args:
        body: A function, plain or ``async``. If `body` is ``async``, await the call of `repeat`.
        until: A value, or a tuple, list or set of values that each end the loop. In a compiled program the
            server compares.
        at_most: The largest number of rounds. The graph of a compiled program contains this number of rounds.

    Returns nothing: read the variables that the last round has set. Raises `InvalidRequest` if `at_most` is
    below 1.
    """
    if at_most < 1:
        raise InvalidRequest(f"at_most is {at_most}; it must be at least 1.", field="at_most")
    wanted = tuple(until) if isinstance(until, tuple | list | set | frozenset) else (until,)
    rounds = _rounds(s, wanted, at_most)
    next(rounds)
    if inspect.iscoroutinefunction(body):
        return _repeat_async(rounds, body, s)
    try:
        while True:
            rounds.send(body(s))
    except StopIteration:
        return None


async def _repeat_async(rounds: Any, body: Callable[[ProgramState], Any], s: ProgramState) -> None:
    try:
        while True:
            rounds.send(await body(s))
    except StopIteration:
        return


def _rounds(s: ProgramState, wanted: Collection[Any], at_most: int) -> Any:
    """A generator that yields before each round, is sent the value that the round returned, and ends after
    the last round."""
    branch = s._branch
    guards: tuple[Guard, ...] = ()
    for _ in range(at_most):
        with branch.under(guards) if isinstance(branch, RecordedBranch) else contextlib.nullcontext():
            value = yield
        source = _source(value)
        if source is not None:
            guards = (*guards, Guard(source, tuple(map(str, wanted)), negated=True))
        elif value is None:
            raise InvalidRequest("The body of repeat returned None, so it cannot end.", field="body")
        elif str(value) in map(str, wanted):
            return


def _source(value: Any) -> ResultRef | None:
    if not issubclass(type(value), Symbolic):
        return None
    text = value.as_text() if issubclass(type(value), SymbolicValue) else value
    known = text is not None and issubclass(type(text), SymbolicText)
    parts: Sequence[str | ResultRef] = text.parts if known else ()
    if len(parts) != 1 or not isinstance(parts[0], ResultRef):
        refuse(value, "a comparison")
    return parts[0]


def _guarded(node: Node, guard: Guard) -> Iterator[Guarded]:
    for step in node.steps():
        if isinstance(step, Guarded):
            yield Guarded(step.step, (guard, *step.guards))
        else:
            yield Guarded(step, (guard,))
