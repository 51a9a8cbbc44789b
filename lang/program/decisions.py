"""The parts of a `decide` step: the decisions behind it that join its request, and the request.

s += decide("urgent", bool, "Is it urgent?")      held until the body reads, or appends another step
s += decide("team", ["billing", "returns"])       joins: one request with two questions
s += "\n"                                         the request is sent
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ramify.decisions.answers import Answer, answer
from ramify.decisions.calibration import calibration_for
from ramify.errors import RamifyError, UnsupportedNode
from ramify.lang.calls.request import all_of
from ramify.lang.calls.session import Target
from ramify.lang.program.nodes import Decide, Step
from ramify.lang.program.sending import lora_of, send
from ramify.lang.program.statement import Statement
from ramify.lang.prompt.chat import Content
from ramify.lang.prompt.question import Place, finished, place_of_question
from ramify.lang.prompt.view import View
from ramify.lang.trace.calls import Call
from ramify.questions import MAX_QUESTIONS, QuestionScores
from ramify.questions import Decide as Questions
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch, Entry

HOLD_S = 0.01
"""Longest time, in seconds, that decisions wait for the next one while the body neither reads a result nor
appends another step nor ends."""

StepFields = tuple[tuple[str, tuple[str, ...]], ...]
"""`Call.asked`."""

SAMPLING = SamplingParams(max_tokens=0, temperature=0.0, token_healing=False)


async def gather(branch: Branch, first: Decide) -> list[Entry]:
    """Take the decisions behind `first` that join its request out of the queue of `branch`."""
    taken: list[Entry] = []
    last: Decide = first
    count, limits = len(first.asked), branch.limits

    def joins(step: Step, statement: Statement) -> bool:
        return (
            isinstance(step, Decide)
            and not last.node.append
            and count + len(step.asked) <= MAX_QUESTIONS
            and step.backend is first.backend
            and _options(step) == _options(first)
            and statement.limits == limits
        )

    heard = branch.run.async_changes(readers=True)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S) as hold, aclosing(heard) as changes:
                async for _ in changes:
                    while (entry := branch.take_next(joins)) is not None:
                        hold.reschedule(asyncio.get_running_loop().time() + HOLD_S)
                        taken.append(entry)
                        assert isinstance(entry[0], Decide)
                        last, count = entry[0], count + len(entry[0].asked)
                    if last.node.append or not branch.may_grow:
                        break
    except BaseException:
        branch.put_back(taken)
        raise
    return taken


def steps_before(error: RamifyError, steps: Sequence[Decide]) -> int:
    """Number of the first of `steps` to ask again, after their request has failed: those before the step that
    `error` is about, or half of them if it names none. 0 for a single step."""
    named = re.match(r"decide\.questions\[(\d+)\]", error.field or "")
    if named is None:
        return len(steps) // 2
    ends = list(accumulate(len(step.asked) for step in steps))
    return bisect_right(ends, int(named[1]))


def _options(step: Decide) -> object:
    """The parts of a step that all steps of a request share."""
    return replace(step.node, question=None, fields={}, name=None, append=False, branch=0, when=(), limits=())


async def ask(
    branch: Branch, call: Call, view: View[Target], steps: Sequence[Decide]
) -> tuple[str, list[list[Answer]]]:
    """Ask the questions of `steps`, which share their options, about `view`. Returns the id of the request,
    and for each step the answers in the order of its fields."""
    node, target = steps[0].node, view.target
    asked = tuple((step.variable or "", tuple(step.asked)) for step in steps)
    decide = Questions(
        questions=tuple([one.question for step in steps for one in step.asked.values()]),
        layout=node.layout,
        end=node.end,
        permutations=node.permutations,
    )
    if node.normalise != "pmi":
        rid, scores = await _scores(branch, call, view, decide, asked)
        prior: Sequence[QuestionScores | None] = [None] * len(decide.questions)
    else:
        calls = [call.child(kind, call.name, None, branch.run.clock()) for kind in ("sample", "prior")]
        (rid, scores), (_, prior) = await all_of(
            _scores(branch, one, view, decide, asked, empty=empty)
            for one, empty in zip(calls, (False, True), strict=True)
        )
    lora = lora_of(branch, call, target)
    calibration = calibration_for(
        target.info.calibration, decide.end, decide.permutations, node.normalise, lora
    )
    answers = iter(
        answer(question, found, node.normalise, empty, calibration)
        for question, found, empty in zip(decide.questions, scores, prior, strict=True)
    )
    return rid, [[next(answers) for _ in step.asked] for step in steps]


async def _scores(
    branch: Branch,
    call: Call,
    view: View[Target],
    decide: Questions,
    asked: StepFields,
    *,
    empty: bool = False,
) -> tuple[str, Sequence[QuestionScores]]:
    """Ask the questions of `decide` about `view` in one request. Returns the request's id and the scores.

    With `empty`, the questions are about a state without content, in a turn if `view` has turns. A trained
    layout writes the texts around a question itself, and is given messages, as are backends that take
    messages.
    """
    target = view.target
    if target.takes_messages or target.info.trained_layout_for(decide.layout):
        content = finished(view.content, target.info)
        place = Place(content, content, None, None)
    else:
        place = place_of_question(view.content, target.info)
    if empty:
        nothing = Content()
        plain = place.closing is None
        place = Place(nothing, nothing, None, None) if plain else place_of_question(nothing, target.info)
    call.asked = asked
    decide = replace(decide, opening=place.opening, closing=place.closing)
    state = view._replace(content=place.state)
    opened = view._replace(content=place.opened)
    output = await send(branch, call, state, SAMPLING, decide=decide, opened=opened)
    call.finish = None  # nothing was generated
    if output.decisions is None or len(output.decisions.questions) != len(decide.questions):
        raise UnsupportedNode(
            f"{type(target.backend).__name__} answered no questions.",
            remedy="Take Engine, RuntimeEndpoint or OpenAI, or a select.",
        )
    return output.rid, output.decisions.questions
