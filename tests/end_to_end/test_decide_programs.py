"""`decide` in programs on real weights: in an engine of this process's own, and at a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field

import ramify as rm
from ramify.lang.backends.base import Wrapper
from ramify.loop import wait
from ramify.messages import ChatMessage, Generate, TextChunk
from tests.end_to_end.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

STATE = "Order 7 arrived broken yesterday. I paid 30 euros, and I want my money back before Friday."


class Ticket(BaseModel):
    refund: bool = Field(description="Does the customer want money back?")
    team: Literal["billing", "returns", "return shipments"] = Field(description="Which team handles it?")
    anger: Annotated[int, rm.Levels("calm", "annoyed", "furious")] = Field(description="How angry are they?")


URGENT = rm.decide("urgent", bool, "Is it urgent?")
TONE = rm.decide("tone", {"calm": "", "angry": "loud or rude"}, "What tone has it?")
TICKET = rm.decide("ticket", Ticket)
NAMES = ("urgent", "tone", "ticket")


class Noting(Wrapper):
    """Passes requests on to an engine and keeps them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.requests: list[Generate] = []

    async def info(self) -> Any:
        return await self._backend.info()

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        async for chunk in self._backend.generate(request):
            yield chunk

    async def end_program(self, program: str) -> None:
        await self._backend.end_program(program)

    async def aclose(self) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[rm.Engine]:
    with rm.Engine(deterministic=True) as made:  # with AMX it is not the default
        yield made


@rm.function
def triage(s, text):
    s += rm.user(text)
    s += URGENT
    s += TONE
    s += TICKET


def test_decisions_in_a_row_are_one_request_with_the_bits_of_each_alone(engine: rm.Engine) -> None:
    noting = Noting(engine)
    together = triage.run(STATE, backend=noting)
    assert together.error() is None
    assert [len(sent.decide.questions) for sent in noting.requests if sent.decide] == [5]
    assert together["ticket"].value.refund in (True, False)
    for name, step in zip(NAMES, (URGENT, TONE, TICKET), strict=True):

        @rm.function
        def alone(s, step=step):
            s += rm.user(STATE)
            s += step

        state = alone.run(backend=engine)
        assert state[name] == together[name]
        cached = state.usage.cached_tokens
        assert cached >= 20, "the state was computed once"


def test_the_prompt_is_that_of_the_chat_template(engine: rm.Engine) -> None:
    """The pieces that a program appends, and the template as a whole, give the same token ids."""
    noting = Noting(engine)
    triage.run(STATE, backend=noting).sync()
    (sent,) = noting.requests
    bare = {"hint": None, "decide": msgspec.structs.replace(sent.decide, prompt_ids=True)}
    pieces = msgspec.structs.replace(sent, rid="pieces", **bare)
    decide = msgspec.structs.replace(pieces.decide, opening=None, closing=None)
    chat = (ChatMessage(role="user", content=STATE),)
    whole = Generate(rid="whole", chat=chat, sampling=sent.sampling, decide=decide)
    found = [wait(answer_of(engine, request)) for request in (pieces, whole)]
    assert found[0] == found[1]
    assert found[0].state_ids
    assert all(form.ids for one in found[0].questions for form in one.forms)


async def answer_of(engine: rm.Engine, request: Generate) -> Any:
    chunks = [chunk async for chunk in engine.generate(request)]
    return chunks[-1].decisions


@pytest.mark.parametrize(
    "options", [{"layout": "labels"}, {"permutations": 2}, {"end": "turn"}, {"normalise": "pmi"}]
)
def test_every_option_gives_probabilities(engine: rm.Engine, options: dict[str, Any]) -> None:
    @rm.function
    def program(s):
        s += rm.user(STATE)
        s += rm.decide("tone", ["calm", "angry"], "What tone has it?", **options)
        s += rm.decide("plain", ["calm", "angry"], "What tone has it?")

    state = program.run(backend=engine)
    assert sum(state["tone"].probabilities.values()) == pytest.approx(1.0)
    assert 0 < state["tone"].option_mass <= 1
    assert state["tone"].probabilities != state["plain"].probabilities


def test_decisions_in_forks_and_behind_generated_text(engine: rm.Engine) -> None:
    @rm.function
    def program(s):
        s += rm.user(STATE) + rm.assistant(rm.gen("reply", max_tokens=12, temperature=0))
        views = s.fork(2)
        views += URGENT
        views += TONE
        views.join()
        s += rm.user("Thanks.") + rm.assistant("Risk: " + rm.decide("risk", ["low", "high"], append=True))

    state = program.run(backend=engine)
    assert state.error() is None
    first, second = state["urgent"]
    assert first == second
    assert state.text().rstrip().endswith(f"Risk: {state['risk'].value}<|im_end|>")


def test_a_call_outside_of_programs(engine: rm.Engine) -> None:
    found = rm.decide(STATE, {"urgent": (bool, "Is it urgent?")}, backend=engine)
    assert found["urgent"] == triage.run(STATE, backend=engine)["urgent"]


def test_a_server_gives_the_same_by_steps_and_as_a_graph(engine: rm.Engine) -> None:
    here = triage.run(STATE, backend=engine)
    with serve("--deterministic") as served:
        backend = rm.RuntimeEndpoint(served.url)
        steps = triage.run(STATE, backend=backend)
        graph = triage.compile().run(text=STATE, backend=backend)
        backend.close()
    for name in NAMES:
        assert steps[name] == graph[name] == here[name]
