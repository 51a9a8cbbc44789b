"""Branches share the content before the fork, run concurrently, and join."""

from __future__ import annotations

import contextlib

import pytest

import ramify as rm
from ramify.lang.prompt.transcript import Piece, append_output, append_text, prompt_of, text_of
from tests.lang.backends import Holding


def test_branches_share_their_prefix_by_reference_and_exactly():
    @rm.function
    def program(s):
        s += "A long common beginning of the prompt." + rm.gen("first")
        forks = s.fork(4)
        for index, branch in enumerate(forks):
            branch += f" Question {index}:" + rm.gen("answer", max_tokens=8)
        forks.join()

    backend = rm.ScriptedBackend({"first": " ok", "answer": " yes"})
    state = program.run(backend=backend)
    assert state["answer"] == [" yes"] * 4
    first, *others = backend.requests
    for request in others:
        assert request.prompt[:2] == (first.prompt[0], (backend.encode([" ok"])[0],))
    branches = state.trace.children[1:]
    before = branches[0].usage.prompt_tokens - 3  # " Question", " 0", ":"
    assert [call.usage.cached_tokens for call in branches] == [before, *[before + 1] * 3]


def test_fork_before_any_text():
    @rm.function
    def program(s):
        forks = s.fork(2)
        forks += ["a", "b"]
        forks += rm.gen("x")
        forks.join()

    state = program.run(backend=rm.ScriptedBackend({"^a$": "1", "^b$": "2"}))
    assert state["x"] == ["1", "2"]
    assert state.text() == ""


def test_nested_forks_gather_nested_lists():
    @rm.function
    def program(s):
        s += "r"
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            branch += f" o{i}"
            inner = branch.fork(2)
            for j, leaf in enumerate(inner):
                leaf += f" i{j}" + rm.gen("x")
            inner.join()
        outer.join()

    def answer(request):
        return request.prompt[0].replace(" ", "")

    state = program.run(backend=rm.ScriptedBackend(answer))
    assert state["x"] == [["ro0i0", "ro0i1"], ["ro1i0", "ro1i1"]]


def test_a_fork_waits_for_steps_before_it_and_only_for_those():
    backend = Holding({"x": "first", "y": "second"})

    @rm.function
    def program(s):
        s += "Q:" + rm.gen("x")
        forks = s.fork(2)
        forks += " and " + rm.gen("y")
        s += " end"
        backend.started.block()
        backend.release.set()
        return forks["y"]

    state = program.run(backend=backend)
    assert state.ret_value == ["second", "second"]
    assert state.text() == "Q:first end"


def test_branches_run_at_once():
    backend = Holding({"x": "a"})

    @rm.function
    def program(s):
        forks = s.fork(5)
        forks += "Q" + rm.gen("x")
        while backend.holding < 5:
            backend.started.block()
        backend.release.set()
        forks.join()

    assert program.run(backend=backend)["x"] == ["a"] * 5
    assert backend.most == 5


def test_a_second_join_of_the_same_name_replaces_the_first():
    @rm.function
    def program(s):
        for _ in range(2):
            forks = s.fork(2)
            forks += "Q" + rm.gen("x")
            forks.join()
            s["x"]

    state = program.run(backend=rm.ScriptedBackend(["a", "b", "c", "d"]))
    assert sorted(state["x"]) == ["c", "d"]


def test_variables_from_before_the_fork_are_seen_but_not_gathered():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("before")
        forks = s.fork(2)
        for branch in forks:
            branch += branch["before"] + rm.gen("after")
        forks.join()

    state = program.run(backend=rm.ScriptedBackend({"before": "b", "after": "a"}))
    assert (state["before"], state["after"]) == ("b", ["a", "a"])


def test_joined_text_keeps_its_token_ids():
    @rm.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += " A:" + rm.gen("x", max_tokens=4)
        forks.join("concate_and_append")
        s += " end" + rm.gen("y")

    backend = rm.ScriptedBackend({"x": " yes", "y": "!"})
    state = program.run(backend=backend)
    yes = tuple(backend.encode([" yes"]))
    assert backend.requests[-1].prompt == ("Q A:", yes, " A:", yes, " end")
    assert state.text() == "Q A: yes A: yes end!"


def test_a_group_is_a_sequence():
    @rm.function
    def program(s):
        forks = s.fork(2)
        assert len(forks) == 2
        assert list(forks) == forks.states
        with pytest.raises(ValueError, match="3 items for 2 branches"):
            forks += ["a", "b", "c"]
        with pytest.raises(TypeError, match="cannot be replaced"):
            forks[0] = s
        with pytest.raises(ValueError, match="join mode is 'mix'"):
            forks.join("mix")
        with pytest.raises(ValueError, match="at least 1"):
            s.fork(0)
        with pytest.raises(rm.UnsupportedField, match="position_ids_offset"):
            s.fork(2, position_ids_offset=[0, 1])

    program.run(backend=rm.ScriptedBackend([]))


def test_transcript_pieces():
    tail = append_text(None, "a")
    assert append_text(tail, "") is tail
    tail = append_text(append_text(tail, "b"), "c")
    tail = append_output(tail, "xyz", (1, 2, 3), 2, "z")
    left, right = append_text(tail, "l"), append_text(tail, "r")
    assert prompt_of(left).segments == ("abc", (1, 2), "zl")
    assert prompt_of(right).segments == ("abc", (1, 2), "zr")
    assert text_of(left) == "abcxyzl"
    assert text_of(left, tail) == "l"
    assert append_output(None, "text", (), 0, "") == Piece(None, "text", "text", generated=True)
    assert prompt_of(None).segments == ()
    for known in (None, tail, tail.before, tail.before.before, left):
        assert prompt_of(left, prompt_of(known)) == prompt_of(left)
        assert prompt_of(right, prompt_of(known)) == prompt_of(right)
    assert prompt_of(None, prompt_of(left)).segments == ()


def test_a_long_transcript_is_freed_without_recursion():
    tail = None
    for _ in range(200_000):
        tail = append_text(tail, "x")
    del tail


def forks(s, joins, reads):
    s += "Q"
    views = s.fork(2)
    for view in views:
        view += rm.gen("z", schema=int)
    if reads:
        for view in views:
            with contextlib.suppress(rm.ProgramError):
                view["z"]
    if joins:
        views.join()


@pytest.mark.parametrize("joins", [False, True])
def test_an_error_of_a_branch_that_nobody_has_read_is_an_error_of_the_program(joins):
    program = rm.function(forks)
    state = program.run(joins, False, backend=rm.ScriptedBackend({"z": ["1", "no"]}, strict=False))
    assert state.error().variable == "z"
    assert "failed" in repr(state)
    assert state.text() == "Q"
    noticed = program.run(joins, True, backend=rm.ScriptedBackend({"z": ["1", "no"]}, strict=False))
    assert noticed.error() is None


def test_a_batch_fails_the_row_of_a_failed_branch(tmp_path):
    program = rm.function(forks)
    backend = rm.ScriptedBackend({"z": ["1", "no", "1", "1"]}, strict=False)
    rows = [{"joins": True, "reads": False}, {"joins": False, "reads": False}]
    summary = program.run_batch(rows, out=tmp_path / "out.jsonl", backend=backend, concurrency=1)
    assert (summary.rows, summary.failed) == (2, 1)
