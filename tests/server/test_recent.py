"""The record of recent programs stays bounded, whatever is asked."""

from __future__ import annotations

import itertools

from ramify.messages import Finish, Generate, ProgramHint, TextChunk, Usage
from ramify.runtime.server.recent import NAME, PROGRAMS, REQUESTS, TEXT, Recent


def record(**options: bool) -> Recent:
    ticks = itertools.count()
    return Recent(clock=lambda: float(next(ticks)), **{"texts": True} | options)


def request(program: str, prompt: str = "Why?", path: tuple[str, ...] = ("gen x",)) -> Generate:
    hint = ProgramHint(program=program, name="judge", path=path)
    return Generate(rid=f"{program}-0", prompt=(prompt,), hint=hint)


def last(text: str = "", **usage: int) -> TextChunk:
    return TextChunk(rid="", text=text, ids=(1, 2), usage=Usage(**usage), finish=Finish(reason="stop"))


def test_programs_that_have_ended_are_forgotten_before_those_that_run() -> None:
    recent = record()
    running = recent.record_request(request("kept"), "/generate")
    for number in range(2 * PROGRAMS):
        recent.record_request(request(f"p{number}"), "/generate").end_request("stop")
    assert [one.id for one in recent] == [f"p{2 * PROGRAMS - 1 - i}" for i in range(PROGRAMS - 1)] + ["kept"]
    running.end_request("stop")


def test_more_programs_run_than_are_remembered() -> None:
    recent = record()
    recordings = [recent.record_request(request(f"p{number}"), "/generate") for number in range(2 * PROGRAMS)]
    assert len(list(recent)) == PROGRAMS
    assert recent.get("p0") is None
    for recording in recordings:
        recording.add_chunk(last("so"))
        recording.end_request("stop")
    assert all(one.running == 0 for one in recent)


def test_sums_outlive_the_requests_that_are_forgotten() -> None:
    recent = record()
    for _ in range(REQUESTS + 10):
        recording = recent.record_request(request("p"), "/generate")
        recording.add_chunk(last(prompt_tokens=3, cached_tokens=1, evicted_tokens=1))
        recording.end_request("stop")
    (program,) = recent
    found = program.details(0.0)
    assert (found["requests"], len(found["calls"])) == (REQUESTS + 10, REQUESTS)
    assert (found["prompt_tokens"], found["evicted_tokens"]) == (3 * (REQUESTS + 10), REQUESTS + 10)


def test_texts_and_names_are_cut() -> None:
    recent = record()
    recording = recent.record_request(
        request("p" * 1000, "x" * 1000 + "!", path=("n" * 1000,) * 1000), "/generate"
    )
    recording.add_chunk(last("y" * 1000))
    (program,) = recent
    (call,) = program.requests
    assert (len(program.id), len(call.path[0])) == (NAME, NAME)
    assert call.prompt == "x" * (TEXT - 1) + "!"
    assert call.text == "y" * TEXT
    assert len(call.path) < 100
    assert recent.get("p" * 1000) is program
    recent.end_program("p" * 1000)
    assert program.ended


def test_the_time_of_a_request() -> None:
    recent = record()
    recording = recent.record_request(request("p"), "/generate")
    recording.add_chunk(TextChunk(rid="", text="a", ids=(1,)))
    (program,) = recent
    call = program.details(9.0)["calls"][0]
    assert (call["start"], call["first"], call["end"], call["out"]) == (0.0, 1.0, None, 1)
    recording.end_request("length")
    call = program.details(9.0)["calls"][0]
    assert (call["end"], call["outcome"]) == (2.0, "length")
