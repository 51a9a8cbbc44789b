"""Limits on time, tokens and calls: of runs, of nested blocks, sync, async, in batches and compiled."""

from __future__ import annotations

import asyncio

import pytest

import ramify as rm
from ramify.errors import BudgetExceeded, InvalidRequest, UnsupportedField
from tests.lang.backends import Holding
from tests.lang.steps import cause, program_of


@rm.function
def three(s):
    for name in "abc":
        s += name + rm.gen(name)


def test_calls_of_a_run():
    backend = rm.ScriptedBackend(lambda request: "x")
    state = three.run(backend=backend, max_calls=2)
    assert (state["a"], state["b"]) == ("x", "x")
    found = cause(state)
    assert (found.field, found.bound, found.spent) == ("max_calls", 2, 2)
    assert str(found) == "max_calls=2 of the run of 'three': 2 calls are spent. Raise it."
    assert state.error().variable == "c"
    assert len(backend.requests) == 2
    assert three.run(backend=backend, max_calls=3).error() is None


def test_samples_and_retries_count_each_and_a_select_once():
    @rm.function
    def program(s):
        with rm.limit(max_calls=99) as sampled:
            s += "?" + rm.gen("many", n=3)
            s.sync()
        with rm.limit(max_calls=99) as retried:
            s += "?" + rm.gen("number", schema=int, retries=2, validate=at_least_two)
            s.sync()
        with rm.limit(max_calls=99) as selected:
            s += "?" + rm.select("pick", ["a", "b", "c"])
            s.sync()
        return sampled.calls, retried.calls, selected.calls

    def at_least_two(value: int) -> None:
        if value < 2:
            raise ValueError("too small")

    script = {"many": "x", "number": ["1", "1", "2"], "pick": "b"}
    assert program.run(backend=rm.ScriptedBackend(script)).ret_value == (3, 3, 1)


def test_tokens_count_prompts_and_outputs_as_usage_does():
    @rm.function
    def program(s):
        with rm.limit(max_total_tokens=1000) as spent:
            s += "one two three" + rm.gen("x")
            s.sync()
            return spent.tokens

    state = program.run(backend=rm.ScriptedBackend({"x": "four five"}))
    assert state.ret_value == state.usage.prompt_tokens + state.usage.completion_tokens == 3 + 3


@pytest.mark.parametrize(("bound", "failing"), [(8, None), (7, "b"), (3, "b"), (2, "a")])
def test_tokens_of_a_run(bound: int, failing: str | None):
    """Step a costs 1 + 2 tokens, step b 3 + 2: one token of each output is the end of the text."""

    two = program_of("a" + rm.gen("a"), " b" + rm.gen("b"))
    state = two.run(backend=rm.ScriptedBackend({"a": " x", "b": " x"}), max_total_tokens=bound)
    used = state.usage.prompt_tokens + state.usage.completion_tokens
    if failing is None:
        assert state.error() is None
        assert used <= bound
    else:
        found = cause(state)
        assert (found.field, found.bound, state.error().variable) == ("max_total_tokens", bound, failing)


def test_max_tokens_is_cut_to_what_is_left():
    backend = rm.ScriptedBackend({"x": "a b c d e f g h"})

    program = program_of("?" + rm.gen("x", max_tokens=100))
    state = program.run(backend=backend, max_total_tokens=5)
    assert backend.requests[0].sampling.max_tokens == 5
    assert cause(state).spent == 1 + 5
    assert state.error().partial == "a b c d e"


def test_the_innermost_exceeded_limit_is_named_and_the_program_goes_on_outside():
    @rm.function
    def program(s):
        with rm.limit(max_calls=2):
            s += "1" + rm.gen("x")
            with rm.limit(max_calls=5):
                with rm.limit(max_calls=1) as inner:  # the line that the error names
                    s += "2" + rm.gen("x")
                    s += "3" + rm.gen("y")
                    s.sync()
                assert inner.calls == 1
                found = cause(s.recover())
                assert "the limit at" in found.message
                assert found.message.endswith("1 calls are spent.")
                assert "go on outside of it" in found.remedy
                s += "4" + rm.gen("y")
                s.sync()
                assert "max_calls=2" in str(cause(s.recover()))
        s += "5" + rm.gen("z")

    state = program.run(backend=rm.ScriptedBackend(lambda request: "x"))
    assert state.text() == "1x2x5x"
    assert state.error() is None


def test_a_limit_holds_for_branches_that_are_forked_in_it():
    @rm.function
    def program(s):
        with rm.limit(max_calls=2):
            forks = s.fork(3)
        for fork in forks:
            fork += "?" + rm.gen("x")
        s += "!" + rm.gen("y")
        failed = [fork.error() for fork in forks]
        assert [error is None for error in failed].count(False) == 1

    assert program.run(backend=rm.ScriptedBackend(lambda request: "x")).text() == "!x"


def test_a_limit_around_runs_holds_for_all_of_them():
    backend = rm.ScriptedBackend(lambda request: "x")
    with rm.limit(max_calls=4) as spent:
        assert three.run(backend=backend).error() is None
        assert cause(three.run(backend=backend)).bound == 4
        rows = three.run_batch([{}, {}], backend=backend)
    assert all(isinstance(cause(row), BudgetExceeded) for row in rows)
    assert spent.calls == 4
    assert three.run(backend=backend).error() is None


def test_the_limit_of_a_run_holds_for_runs_that_its_body_begins():
    backend = rm.ScriptedBackend(lambda request: "x")

    @rm.function
    def outer(s):
        s += "?" + rm.gen("x")
        return three.run(backend=backend).error()

    state = outer.run(backend=backend, max_calls=3)
    assert cause(state.ret_value).spent == 3
    assert state.error() is None


def test_rows_of_a_batch_have_a_limit_each():
    states = three.run_batch([{}] * 3, backend=rm.ScriptedBackend(lambda request: "x"), max_calls=2)
    assert [cause(state).spent for state in states] == [2, 2, 2]


def test_bound_and_streamed():
    bound = three.bind(backend=rm.ScriptedBackend(lambda request: "x"), max_calls=1)
    assert cause(bound.run()).bound == 1
    assert bound.run(max_calls=3).error() is None
    state = three.with_options(max_total_tokens=5).run(
        backend=rm.ScriptedBackend(lambda request: "x"), stream=True
    )
    with pytest.raises(rm.ProgramError, match="max_total_tokens=5"):
        "".join(state.text_iter())


async def test_async_programs():
    backend = rm.ScriptedBackend(lambda request: "x")

    @rm.function
    async def program(s):
        with rm.limit(max_calls=1):
            s += "a" + rm.gen("x")
            s += "b" + rm.gen("y")
        s.fork(1)
        await s.wait()
        s.recover()
        s += "c" + rm.gen("z")

    state = await program.run(backend=backend, max_calls=2)
    assert state.text() == "axcx"
    states = await asyncio.gather(*(program.run(backend=backend, max_calls=1) for _ in range(3)))
    assert all(cause(state).bound == 1 for state in states)
    assert [state["z"] for state in await program.run_batch([{}, {}], backend=backend)] == ["x", "x"]


def test_time_ends_the_step_in_flight_and_the_steps_after_it():
    backend = Holding({"x": "long answer", "y": "long answer", "pick": "a"})

    @rm.function
    def program(s):
        with rm.limit(timeout=0.05):
            forks = s.fork(2)
            forks[0] += "a" + rm.gen("x", timeout=60)
            forks[1] += "b" + rm.gen("y", n=2)
            for fork in forks:
                assert cause(fork).field == "timeout"
            s += "late" + rm.gen("x")
            found = cause(s)
        assert found.spent >= found.bound
        s.recover()
        return found.bound

    state = program.run(backend=backend)
    assert state.error() is None
    assert state.ret_value == 0.05
    assert backend.aborted == 3
    assert len(backend.requests) == 3  # and none for the late step
    assert program.run(backend=backend, timeout=0.01).ret_value == 0.01


def test_time_holds_for_joins_and_tools():
    @rm.tool
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(60)
        return ""

    @rm.function
    def program(s):
        s += rm.user("?")
        with rm.limit(timeout=0.05):
            s.call_tools([slow], name="calls")
        found = cause(s)
        s.recover()
        return found.field, s.messages()

    script = {"calls": '\n{"name": "slow", "arguments": {}}\n</tool_call>'}
    field, messages = program.run(backend=rm.ScriptedBackend(script)).ret_value
    assert field == "timeout"
    assert [turn["role"] for turn in messages] == ["user"]

    backend = Holding(["long"])

    @rm.function
    def joins(s):
        forks = s.fork(1)
        forks[0] += "a" + rm.gen("x")
        with rm.limit(timeout=0.02):
            forks.join("concate_and_append")
        found = cause(s)
        backend.release.set()
        return found.field

    assert joins.run(backend=backend).ret_value == "timeout"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"max_total_tokens": 0}, "max_total_tokens"),
        ({"max_total_tokens": 1.5}, "max_total_tokens"),
        ({"max_calls": True}, "max_calls"),
        ({"max_calls": -1}, "max_calls"),
    ],
)
def test_wrong_bounds_are_refused_by_name(options: dict, field: str):
    for call in (lambda: rm.limit(**options), lambda: three.run(backend=rm.ScriptedBackend([]), **options)):
        with pytest.raises(InvalidRequest, match=f"{field} is") as refused:
            call()
        assert refused.value.field == field


def test_a_parameter_of_the_program_goes_before_the_option():
    @rm.function
    def program(s, max_calls):
        s += "a" + rm.gen("x") + "b" + rm.gen("y")
        return max_calls

    state = program.run(max_calls=1, backend=rm.ScriptedBackend(["x", "y"]))
    assert (state.ret_value, state["y"]) == (1, "y")


def test_what_takes_no_limit_says_so():
    with pytest.raises(InvalidRequest, match="limit needs"):
        rm.limit()

    @rm.function
    def outer(s):
        three(s, max_calls=1)

    with pytest.raises(UnsupportedField, match=r"max_calls has no effect. Call it in a block: with rm.limit"):
        outer.run(backend=rm.ScriptedBackend([]))

    with rm.limit(max_calls=2):
        compiled = three.compile()
    assert cause(compiled.run(backend=rm.ScriptedBackend(lambda request: "x"), max_calls=1)).bound == 1


@pytest.mark.parametrize("where", ["engine", "endpoint"])
def test_concurrent_branches_share_the_tokens_of_a_limit(where: str, request: pytest.FixtureRequest):
    backend = request.getfixturevalue(where)

    @rm.function
    def program(s):
        s += "Count: "
        with rm.limit(max_total_tokens=400) as spent:
            forks = s.fork(4)
            for index, fork in enumerate(forks):
                fork += f"{index}" + rm.gen("x", max_tokens=2000, ignore_eos=True, temperature=0)
            found = [cause(fork) for fork in forks]
            s += "late" + rm.gen("x", ignore_eos=True)
            assert cause(s).field == "max_total_tokens"
        s.recover()
        s += "after" + rm.gen("y", max_tokens=5, ignore_eos=True)
        s.sync()
        return spent.tokens, found

    state = program.run(backend=backend)
    tokens, found = state.ret_value
    last = state.trace.children[-1].own_usage
    assert state.error() is None
    # A step may append several tokens at once: at most as many as are drafted.
    assert 380 <= tokens <= 440
    outside = last.prompt_tokens + last.completion_tokens
    assert state.usage.prompt_tokens + state.usage.completion_tokens == tokens + outside
    assert last.completion_tokens == 5
    assert [error.bound for error in found] == [400] * 4
    assert all(error.spent >= 380 for error in found)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_program_at_a_server_has_the_limits_of_its_run(endpoint: rm.RuntimeEndpoint, compiled: bool):
    program = program_of(
        "Count: " + rm.gen("x", max_tokens=20, ignore_eos=True, temperature=0),
        " and " + rm.gen("y", max_tokens=500, ignore_eos=True, temperature=0),
    )
    tokens = program.run(backend=endpoint, compiled=compiled, max_total_tokens=150)
    assert len(tokens["x"]) > 0
    found = cause(tokens)
    assert (found.field, found.bound, tokens.error().variable) == ("max_total_tokens", 150, "y")
    spent = tokens.usage.prompt_tokens + tokens.usage.completion_tokens
    assert 145 <= spent <= 165
    assert tokens.trace.children[-1].text == tokens.error().partial
    calls = program.run(backend=endpoint, compiled=compiled, max_calls=1)
    assert (cause(calls).field, calls.error().variable) == ("max_calls", "y")
