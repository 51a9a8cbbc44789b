"""Admission by program: who goes first, whether siblings go together, and that no request starves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import EndProgram, Submit
from ramify.messages import ProgramHint
from ramify.runtime.scheduler.admission import (
    OVERTAKING,
    OVERTAKING_BATCHES,
    Candidate,
    HighestResponseRatioNext,
    together,
)
from ramify.runtime.scheduler.requests.programs import LEAST_LEFT, PRIOR_SERVICE, Programs
from ramify.runtime.scheduler.requests.request import Request
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler
from tests.runtime.policy_simulation import Simulation
from tests.runtime.program_traces import Call, Trace, generate
from tests.runtime.test_scheduler import prompt_of

pytestmark = pytest.mark.slow

NUMBERS = itertools.count()


def arrive(programs: Programs, program: str = "", tokens: int = 10, now: float = 0.0, **hint: Any) -> Request:
    submit = Submit(
        rid=f"r{next(NUMBERS)}",
        ids=tuple(range(tokens)),
        sampling=SamplingParams(),
        hint=ProgramHint(program=program, **hint) if program else None,
    )
    request = Request(submit, arrival=now, max_tokens=10)
    programs.join(request)
    return request


def served(programs: Programs, program: str, tokens: float, **hint: Any) -> None:
    """Record a past request of the program that took `tokens` tokens of service."""
    request = arrive(programs, program, **hint)
    request.program.served += tokens
    programs.leave(request)


def order(programs: Programs, requests: list[Request]) -> list[Request]:
    policy = HighestResponseRatioNext(programs)
    return sorted(requests, key=lambda request: policy.key(request, 0, 0.0))


def test_a_program_of_which_little_is_usually_left_goes_first() -> None:
    programs = Programs()
    for name, tokens in (("short", 3000), ("long", 90_000)):
        for number in range(20):
            served(programs, f"{name}{number}", tokens, name=name)
            programs.end(f"{name}{number}")
    served(programs, "old", 40_000, name="long")
    old, new, short, single = (
        arrive(programs, "old", name="long"),
        arrive(programs, "new", name="long"),
        arrive(programs, "s", name="short"),
        arrive(programs),
    )
    assert order(programs, [new, old, single, short]) == [short, single, old, new]


def test_requests_of_a_session_are_taken_one_by_one() -> None:
    """A client names one session for ever, such as a constant ``prompt_cache_key``."""
    programs = Programs()
    for _ in range(50):
        served(programs, "nightly", 40_000, name="python", session=True)
    session, single = arrive(programs, "nightly", session=True), arrive(programs)
    policy = HighestResponseRatioNext(programs)
    assert policy.key(session, 0, 0.0) == policy.key(single, 0, 0.0)
    assert not session.program.calls
    assert len(programs) == 0
    assert session.owner == "nightly"
    assert session.flow_key != single.flow_key


def test_of_unknown_programs_what_is_usual_for_all_is_left() -> None:
    programs = Programs()
    assert arrive(programs, "first").program.left(None) == PRIOR_SERVICE
    for number in range(200):
        served(programs, f"p{number}", 1000, name="known")
        programs.end(f"p{number}")
    served(programs, "begun", 600)
    usual = arrive(programs, "new").program.left(None)
    assert usual == pytest.approx(1000, rel=0.4)
    assert arrive(programs, "begun").program.left(None) == pytest.approx(usual - 600)
    served(programs, "endless", 10**6)
    assert arrive(programs, "endless").program.left(None) == LEAST_LEFT * 10**6


def test_who_has_waited_longer_for_what_it_needs_goes_first() -> None:
    """Waiting is measured in service that the engine gave, so the speed of the engine does not matter."""
    programs = Programs()
    victim = arrive(programs, "long")
    other = arrive(programs, "other", name="other")
    programs.serve(other, 10**7)
    short = arrive(programs)
    assert order(programs, [short, victim]) == [victim, short]
    early = Programs()
    assert order(early, [arrive(early, "long"), arrive(early)])[0].hint is None


def test_what_a_program_has_waited_before_counts() -> None:
    programs = Programs()
    first = arrive(programs, "patient", name="n")
    programs.serve(arrive(programs), 10**6)
    programs.started(first)
    programs.leave(first)
    fresh, patient = arrive(programs, "fresh", name="n"), arrive(programs, "patient", name="n")
    assert programs.waited(patient) == programs.waited(fresh) + 10**6 + 16
    assert order(programs, [fresh, patient]) == [patient, fresh]


def test_a_program_that_is_near_its_known_end_goes_first() -> None:
    programs = Programs()
    found = []
    for name, calls_left in (("far", 8), ("near", 1), ("last", 0)):
        served(programs, name, 500)
        found.append(arrive(programs, name, calls_left=calls_left))
    assert order(programs, found) == found[::-1]


def test_the_last_branch_that_a_join_waits_for_goes_first() -> None:
    programs = Programs()
    one, two = arrive(programs, "wide", forks=("f",)), arrive(programs, "wide", forks=("f",))
    last = arrive(programs, "narrow", forks=("f",))
    assert order(programs, [one, two, last]) == [last, one, two]


@pytest.mark.parametrize("policy", ["program", "prefix", "fcfs"])
def test_nobody_is_overtaken_more_often_than_the_bound(policy: str) -> None:
    """A long request waits among short ones that arrive faster than they can be served."""
    prompt = np.arange(40, dtype=np.int32)
    hint = ProgramHint(program="victim", name="long")
    calls = [Call(0.01 * number, 0.01 * number, prompt, prompt[:3]) for number in range(400)]
    calls.append(Call(0.305, 0.305, np.arange(4000, dtype=np.int32)[::-1].copy(), prompt, hint))
    simulation = Simulation(policy, max_running=2, num_pages=2000)
    places: list[int] = []
    starts: list[Request] = []
    programs = simulation.programs
    join, start = programs.join, programs.started

    def joining(request: Request) -> None:
        if request.hint is not None:
            places.extend((len(starts), len(simulation.waiting)))
        join(request)

    def starting(request: Request) -> None:
        starts.append(request)
        start(request)

    programs.join, programs.started = joining, starting  # type: ignore[method-assign]
    simulation.run(Trace(calls, []))
    admitted, place = places
    waited = next(i for i, request in enumerate(starts) if request.hint is not None) - admitted
    assert waited <= OVERTAKING * place + (OVERTAKING_BATCHES + 1) * 2
    if policy == "fcfs":
        assert waited == place
    if policy == "program":
        assert place < waited < len(calls) - admitted - 1


def test_siblings_stand_together_where_the_first_of_them_stands() -> None:
    programs = Programs()
    requests = [
        arrive(programs, "a", forks=("f",)),
        arrive(programs, "b"),
        arrive(programs, "a", forks=("f",)),
        arrive(programs, "a", forks=("f", "g")),
        arrive(programs),
        arrive(programs, "a", forks=("f",)),
    ]
    found: Any = [Candidate(request, None) for request in requests]  # type: ignore[arg-type]
    assert [requests.index(one.request) for one in together(found)] == [0, 2, 5, 1, 3, 4]


def test_siblings_run_in_one_batch(tiny_model: Any) -> None:
    """Requests that arrived in between do not separate the branches of a fork if there is room for all."""
    local = LocalScheduler(tiny_model, max_running=4, policy="program")
    trunk = prompt_of(60)
    branches, others = [], []
    for seed in range(4):
        hint = ProgramHint(program="p", forks=("f",), branch=str(seed))
        branches.append(local.submit([*trunk, seed], max_tokens=3, hint=hint, ignore_eos=True))
        others.append(local.submit(prompt_of(80, seed + 1), max_tokens=3, ignore_eos=True))
    together_seen = False
    for _ in range(100):
        local.step()
        running = {request.rid for request in local.scheduler.requests.running}
        together_seen |= running == set(branches)
        if not local.scheduler.busy:
            break
    assert together_seen
    assert all(local.results[rid].ended for rid in branches + others)


@pytest.mark.parametrize("policy", ["program", "prefix", "fcfs"])
def test_every_program_ends_under_overload(policy: str) -> None:
    simulation = Simulation(policy, max_running=8, num_pages=6000)
    trace = generate(5, 8.0, 2.0, ["judge", "agent", "plain"])
    times = simulation.run(trace)
    assert len(times) == len(trace.ends) + sum(call.hint is None for call in trace.calls)
    simulation.cache.check()
    counts = simulation.cache.counts()
    assert (counts.in_use, counts.leased) == (0, 0)


@pytest.mark.parametrize(("running", "rate"), [(4, 0.375), pytest.param(16, 1.05, marks=pytest.mark.long)])
def test_programs_end_sooner_than_by_other_orders_and_nobody_pays(running: int, rate: float) -> None:
    """The load is 1.5 times the capacity, on simulated time: the same on every machine."""

    def ends(policy: str) -> tuple[float, float, float, float]:
        programs: list[float] = []
        plain: list[float] = []
        for seed in (1, 2):
            trace = generate(seed, 70.0 / rate, rate)
            times = Simulation(policy, running, num_pages=40_000).run(trace)
            for name, seconds in times.items():
                (plain if name.startswith("plain") else programs).append(seconds)
        return (
            float(np.mean(programs)),
            float(np.percentile(programs, 99)),
            float(np.mean(plain)),
            float(np.percentile(plain, 99)),
        )

    found = ends("program")
    for policy in ("fcfs", "prefix"):
        shares = [mine / other for mine, other in zip(found, ends(policy), strict=True)]
        assert max(shares[:3]) < 1
        assert shares[3] < 1.5


def test_a_program_that_ends_is_forgotten(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    local.complete([prompt_of(20)], max_tokens=2, hint=ProgramHint(program="p", name="n"))
    assert len(local.scheduler.requests.programs) == 1
    local.scheduler.receive(EndProgram(program="p"))
    assert len(local.scheduler.requests.programs) == 0
