"""Questions about states, asked of the engine, and their answers: the core of all endpoints for decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request

from ramify.decisions.answers import Answer, answer
from ramify.decisions.calibration import calibration_for
from ramify.decisions.checks import Place, place_of
from ramify.errors import EngineError, InvalidRequest, PromptTooLong, UnsupportedField
from ramify.messages import ChatMessage, Generate, TextChunk
from ramify.questions import (
    MAX_OPTIONS,
    Calibration,
    Decide,
    DecisionScores,
    LayoutName,
    Normalisation,
    OptionEnd,
    Question,
    QuestionScores,
)
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.request import lora_of, parse_request, refuse_abort
from ramify.runtime.server.params import explain_by_field
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import collect, while_connected
from ramify.runtime.server.tables.rows import Endpoint
from ramify.sampling_params import SamplingParams

_Orders = Annotated[int, msgspec.Meta(ge=1, le=MAX_OPTIONS)]
MAX_SCORES_ON_LOOP = 4_000
"""Most scores of which answers are computed on the event loop, in about 10 ms. More are computed in a thread,
so that other clients are served meanwhile."""
States = Sequence[tuple[Generate, Sequence[Question]]]
"""States, each with the questions about it. A state is a `Generate` that has only an id and a prompt or a
chat."""


class Asked(NamedTuple):
    """A parsed and checked request. Its generations start when `answers_of` reads them."""

    streams: list[AsyncGenerator[TextChunk, None]]
    """The chunks of each state; for "pmi" followed by those of the empty state, once for each state."""
    questions: list[Sequence[Question]]
    """The questions about each state."""
    normalise: Normalisation
    calibration: Calibration | None


class Answered(NamedTuple):
    """The answer to a question."""

    answer: Answer
    form_ids: list[tuple[int, ...]]
    """Token ids of each written form of the question, which follow those of the state. Empty unless
    ``return_prompt_ids`` asks for them, as is `state_ids`."""
    state_ids: tuple[int, ...]

    def own_fields(self) -> dict[str, Any]:
        """Fields of the answer's JSON beyond those of each API: ``option_mass``, ``layout``,
        ``temperature``, and ``prompt_ids`` if there are token ids."""
        own = {name: getattr(self.answer, name) for name in ("option_mass", "layout", "temperature")}
        return own | ({"prompt_ids": self.form_ids} if self.form_ids else {})


class Answers(NamedTuple):
    """The answers to all questions of a request, in their order."""

    answers: list[Answered]
    prompt_tokens: int
    """Tokens of the states and of the questions, as `Usage` counts them, those behind an empty state
    included."""
    cached_tokens: int


def trained_layout(service: Service, fields: Fields) -> str:
    """Name and version of the trained layout in which the questions of a request are written; empty for a
    layout of other models."""
    layout: LayoutName = fields.take("layout", LayoutName, "auto")
    return service.frontend.info.trained_layout_for(layout)


def ask(
    service: Service,
    fields: Fields,
    header: Mapping[str, Any],
    states: States,
    endpoint: Endpoint,
    spelled: Mapping[str, str],
) -> Asked:
    """Parse the remaining fields of a request. Fields that are unknown or unsupported are refused.

    header : the result of `take_header`, or another mapping with "id" and "model"
    spelled : our name of a field → the client's name, for errors of the engine
    """
    decide = Decide(
        questions=(),
        layout=fields.take("layout", LayoutName, "auto"),
        end=fields.take("end", OptionEnd, "prefix"),
        permutations=fields.take("permutations", _Orders, 1),
        prompt_ids=fields.take("return_prompt_ids", bool, False),
    )
    normalise: Normalisation = fields.take("normalise", Normalisation, "sum")
    generations = [
        msgspec.structs.replace(state, decide=msgspec.structs.replace(decide, questions=tuple(questions)))
        for state, questions in states
    ]
    if normalise == "pmi":
        generations += [emptied(generation) for generation in generations]
    service.check_count(len(generations))
    parsed = parse_request(
        service,
        fields,
        header,
        generations,
        SamplingParams(max_tokens=0),
        endpoint,
        explain=explain_by_field(None),
        spelled=spelled,
    )
    if parsed.stream:
        raise UnsupportedField("Decisions are not streamed.", field="stream")
    questions = [questions for _, questions in states]
    lora = lora_of(service, header["model"])
    own = service.frontend.info.calibration
    calibration = calibration_for(own, decide.end, decide.permutations, normalise, lora)
    return Asked(parsed.streams, questions, normalise, calibration)


async def answers_of(request: Request, asked: Asked, path_of: Callable[[Place, int], str]) -> Answers:
    """The answers to all questions. Raises `ClientGone` if the client of `request` disconnects before.

    path_of : (a place in a `Decide`, index of the state) → the client's path of it, for errors of the engine
    """

    async def located(index: int, stream: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
        async with aclosing(stream):
            try:
                async for chunk in stream:
                    yield chunk
            except InvalidRequest as error:
                if isinstance(error, PromptTooLong) and error.field is not None:
                    error.message = error.message.replace("your messages", f"your {error.field}")
                if error.field is not None and (place := place_of(error.field)) is not None:
                    ours, error.field = error.field, path_of(place, index % len(asked.questions))
                    error.message = error.message.replace(ours, error.field)
                raise

    streams = [located(*each) for each in enumerate(asked.streams)]
    results = await while_connected(request.receive, collect(streams))
    found: list[DecisionScores] = []
    for result in results:
        refuse_abort(result.finish)
        if result.decisions is None:
            raise EngineError("The engine has answered no questions.")
        found.append(result.decisions)
    scores = sum(len(form.options) for one in found for each in one.questions for form in each.forms)
    many = scores > MAX_SCORES_ON_LOOP
    return Answers(
        await asyncio.to_thread(_answered, asked, found) if many else _answered(asked, found),
        sum(result.usage.prompt_tokens for result in results),
        sum(result.usage.cached_tokens for result in results),
    )


def _answered(asked: Asked, found: Sequence[DecisionScores]) -> list[Answered]:
    """The answer to each question. `found`: the scores of each of `asked.streams`."""
    answers = []
    for index, questions in enumerate(asked.questions):
        here = found[index]
        empty: Sequence[QuestionScores | None] = [None] * len(questions)
        if asked.normalise == "pmi":
            empty = found[len(asked.questions) + index].questions
        for question, own, without in zip(questions, here.questions, empty, strict=True):
            given = answer(question, own, asked.normalise, without, asked.calibration)
            form_ids = [form.ids for form in own.forms if form.ids]
            answers.append(Answered(given, form_ids, here.state_ids))
    return answers


def emptied(generation: Generate) -> Generate:
    """`generation` with an empty state: a user turn or a prompt without text."""
    if generation.chat is None:
        return msgspec.structs.replace(generation, prompt=("",))
    return msgspec.structs.replace(generation, chat=(ChatMessage(role="user", content=""),))
