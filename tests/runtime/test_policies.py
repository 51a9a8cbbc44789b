"""The order of admission by program: who goes first, that siblings go together, that nobody starves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.program_traces import generate
from benchmarks.programs_load import Simulation
from ramify.messages import EndProgram, ProgramHint, Submit
from ramify.runtime.scheduler.admission import Candidate, together
from ramify.runtime.scheduler.policy import (
    MOST_LEFT,
    PROGRAM_AGEING_PER_S,
    LeastLeftFirst,
)
from ramify.runtime.scheduler.programs import UNKNOWN_LEFT, Programs
from ramify.runtime.scheduler.request import Request
from ramify.sampling import SamplingParams
from tests.runtime.local import LocalScheduler
from tests.runtime.test_scheduler import prompt_of

NUMBERS = itertools.count()


def arrive(programs: Programs, program: str = "", tokens: int = 10, now: float = 0.0, **hint: Any) -> Request:
    submit = Submit(
        rid=f"r{next(NUMBERS)}",
        ids=tuple(range(tokens)),
        sampling=SamplingParams(),
        hint=ProgramHint(program=program, **hint) if program else None,
    )
    request = Request(submit, arrival=now, max_tokens=10, default_seed=0)
    programs.join(request)
    return request


def served(programs: Programs, program: str, tokens: float, **hint: Any) -> None:
    """The program has had a request that took so many tokens."""
    request = arrive(programs, program, **hint)
    request.program.served += tokens
    programs.leave(request)


def order(requests: list[Request], now: float = 0.0) -> list[Request]:
    return sorted(requests, key=lambda request: LeastLeftFirst().key(request, 0, now))


def test_a_program_of_which_little_is_usually_left_goes_first() -> None:
    programs = Programs()
    for name, tokens in (("short", 100), ("long", 9000)):
        served(programs, name, tokens, name=name)
        programs.end(name)
    served(programs, "", 1000)
    served(programs, "old", 4000, name="long")
    old, new, short, single = (
        arrive(programs, "old", name="long"),
        arrive(programs, "new", name="long"),
        arrive(programs, "s", name="short"),
        arrive(programs),
    )
    assert order([new, old, single, short]) == [short, single, old, new]


def test_of_unknown_programs_the_one_that_had_least_goes_first_up_to_a_bound() -> None:
    programs = Programs()
    for name, tokens in (("little", 50), ("much", UNKNOWN_LEFT), ("more", 10 * UNKNOWN_LEFT)):
        served(programs, name, tokens)
    had = {name: arrive(programs, name) for name in ("much", "more", "little", "nothing")}
    assert order(list(had.values())) == [had["nothing"], had["little"], had["much"], had["more"]]
    assert had["much"].program.left(None) == had["more"].program.left(None)


def test_a_program_that_is_near_its_known_end_goes_first() -> None:
    programs = Programs()
    found = []
    for name, calls_left in (("far", 8), ("near", 1), ("last", 0)):
        served(programs, name, 500)
        found.append(arrive(programs, name, calls_left=calls_left))
    assert order(found) == found[::-1]


def test_the_last_branch_that_a_join_waits_for_goes_first() -> None:
    programs = Programs()
    one, two = arrive(programs, "wide", forks=("f",)), arrive(programs, "wide", forks=("f",))
    last = arrive(programs, "narrow", forks=("f",))
    assert order([one, two, last]) == [last, one, two]


def test_nobody_is_overtaken_for_longer_than_the_bound() -> None:
    """However much is left of a program and however little of those that keep coming."""
    programs = Programs()
    served(programs, "big", 10**9, name="big")
    programs.end("big")
    victim = arrive(programs, "victim", name="big", tokens=1000)
    assert victim.program.left(None) > MOST_LEFT
    bound = (MOST_LEFT + 1000) / PROGRAM_AGEING_PER_S
    fresh = arrive(programs, tokens=1, now=bound + 3)
    assert order([fresh, victim], now=bound + 3)[0] is victim
    early = arrive(programs, tokens=1, now=bound / 2)
    assert order([early, victim], now=bound / 2)[0] is early


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
    """With room for all of a fork, strangers that came in between do not part its branches."""
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
        running = {request.rid for request in local.scheduler._running}
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
    simulation._cache.check()
    counts = simulation._cache.counts()
    assert (counts.in_use, counts.leased) == (0, 0)


def test_programs_and_plain_requests_end_sooner_than_first_come_first_served() -> None:
    """On simulated time, so that it is the same on every machine."""

    def mean(policy: str) -> tuple[float, float]:
        trace = generate(2, 30.0, 2.0, ["judge", "agent", "map", "plain"])
        times = Simulation(policy, max_running=16, num_pages=20_000).run(trace)
        plain = [seconds for name, seconds in times.items() if name.startswith("plain")]
        rest = [seconds for name, seconds in times.items() if not name.startswith("plain")]
        return sum(rest) / len(rest), sum(plain) / len(plain)

    by_program, by_arrival = mean("program"), mean("fcfs")
    assert by_program[0] < by_arrival[0]
    assert by_program[1] < by_arrival[1]


def test_a_program_that_ends_is_forgotten(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    local.complete([prompt_of(20)], max_tokens=2, hint=ProgramHint(program="p", name="n"))
    assert len(local.scheduler._programs) == 1
    local.scheduler.receive(EndProgram(program="p"))
    assert len(local.scheduler._programs) == 0
