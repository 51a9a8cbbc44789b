"""Hints in requests: the program, the branch, and the next use of the branch's pages."""

from __future__ import annotations

import json

import ramify as rm
from ramify.messages import ProgramHint
from tests.lang.steps import add

ANSWERS = {"x": "a", "y": "b", "z": "c"}


def hints_of(program, answers=ANSWERS, **arguments) -> tuple[list[ProgramHint], rm.ScriptedBackend]:
    backend = rm.ScriptedBackend(answers)
    state = program.run(backend=backend, **arguments)
    assert state.error() is None
    return [request.hint for request in backend.requests], backend


def test_a_step_that_is_followed_by_another_is_needed_soon():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x") + "R" + rm.gen("y")
        s["y"]
        s += "S" + rm.gen("z")

    (first, second, last), backend = hints_of(program)
    assert first.name == "program"
    assert (first.next_use, second.next_use, last.next_use) == ("soon", "unknown", "never")
    assert first.lease_s > 0
    assert second.lease_s > 0
    assert last.lease_s == 0
    assert last.calls_left == 0
    assert first.branch == second.branch == last.branch
    assert backend.ended == [first.program]


def test_what_is_left_is_known_once_the_body_has_returned():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        forks = s.fork(2)
        forks += rm.gen("y") + "R" + rm.gen("z")

    hints, _ = hints_of(program)
    known = [hint.calls_left for hint in hints if hint.calls_left is not None]
    assert known
    assert known[-1] == 0
    assert known == sorted(known, reverse=True)


def test_the_branches_of_a_fork_say_that_the_parent_goes_on_from_there():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        s["x"]
        forks = s.fork(2)
        forks += "R" + rm.gen("y")
        for fork in forks:
            fork["y"]
        forks.join()
        s += "S" + rm.gen("z")
        s["z"]

    (root, one, other, after), _ = hints_of(program)
    assert root.forks == after.forks == ()
    assert (root.path, other.path) == (("gen x",), ("fork 1", "gen y"))
    assert len(one.forks) == 1
    assert one.forks == other.forks
    assert len({root.branch, one.branch, other.branch}) == 3
    assert after.branch == root.branch
    assert root.ended == one.ended == other.ended == ()
    assert set(after.ended) == {one.branch, other.branch, *one.forks}


def test_the_first_request_of_a_branch_says_where_its_fork_is():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x")
        s += "Read this: "
        s += "a long text."
        for fork in s.fork(2):
            fork += " And?" + rm.gen("y")
            fork += " Why?" + rm.gen("z")
            fork["z"]

    hints, backend = hints_of(program)
    assert [hint.parts for hint in hints] == [(), ((2, 23),), (), ((2, 23),), ()]
    segments = backend.requests[1].prompt
    assert (len(segments), segments[2][:23], segments[2][23:]) == (3, "Read this: a long text.", " And?")


def test_a_branch_that_still_runs_when_it_is_joined_ends_later():
    @rm.function
    def program(s):
        forks = s.fork(2)
        forks += "R" + rm.gen("y")
        forks.join()
        s += "S" + rm.gen("x")
        s["x"]
        assert s["y"] == ["b", "b"]
        s += rm.gen("z")

    hints, _ = hints_of(program)
    ended = [part for hint in hints for part in hint.ended]
    assert len(ended) == len(set(ended)) == 3
    assert set(hints[-1].forks) == set()


def test_nested_forks_name_the_outer_one_first():
    @rm.function
    def program(s):
        outer = s.fork(2)
        for fork in outer:
            fork += "a"
            inner = fork.fork(2)
            inner += rm.gen("x")

    hints, _ = hints_of(program)
    assert {len(hint.forks) for hint in hints} == {2}
    assert len({hint.forks[0] for hint in hints}) == 1
    assert len({hint.forks[1] for hint in hints}) == 2
    assert all(hint.lease_s > 0 for hint in hints), "what they share is kept for who goes on from the fork"


def test_a_turn_of_tool_calls_waits_for_tools():
    @rm.function
    def program(s):
        s += "Add 1 and 2."
        s.call_tools([add], "calls")
        s += rm.gen("x")
        s["x"]

    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    hints, _ = hints_of(program, [f"\n{call}\n</tool_call>", "3"])
    assert [hint.next_use for hint in hints] == ["tool", "unknown"]


def test_only_the_first_of_many_samples_is_gone_on_from():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("x", n=3)
        s["x"]
        s += "R" + rm.gen("y")
        s["y"]

    hints, _ = hints_of(program)
    assert sorted(hint.next_use for hint in hints[:3]) == ["never", "never", "unknown"]
