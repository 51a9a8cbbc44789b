"""Scoring of choices: the pure methods, the requests, and the border of prompt and choice."""

from __future__ import annotations

import math

import msgspec
import pytest

import ramify as rm
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.calls.choices import Scored
from ramify.messages import Choices, TokenLogprobs
from tests.lang.steps import program_of

LENGTH = rm.token_length_normalized
GREEDY = rm.greedy_token_selection
ALONE = rm.unconditional_likelihood_normalized


def run(*logprobs):
    return TokenLogprobs(ids=tuple(range(len(logprobs))), logprobs=logprobs)


@pytest.mark.parametrize(
    ("method", "rows", "alone", "chosen"),
    [
        (LENGTH, [(-1.0, -1.0), (-0.5, -1.0)], None, 1),
        (LENGTH, [(-1.0,), (-1.0, -1.0)], None, 0),  # a tie goes to the first
        (LENGTH, [(None, -3.0), (-2.0, -2.0)], None, 1),  # None is no token of the mean
        (LENGTH, [(), (-0.1,)], None, 0),
        (GREEDY, [(-1.0, -9.0), (-2.0, -0.1)], None, 0),  # the first token decides
        (GREEDY, [(-1.0, -2.0), (-1.0, -1.0)], None, 1),
        (GREEDY, [(-1.0,), (-1.0, -2.0)], None, 0),  # extended by its mean, -1
        (GREEDY, [(-1.0, -3.0), (-1.0,)], None, 1),
        (ALONE, [(-1.0, -1.0), (-2.0, -2.0)], [(None, -1.0), (None, -9.0)], 1),
        (ALONE, [(-1.0,), (-2.0,)], [(None,), (None,)], 0),
    ],
)
def test_methods(method, rows, alone, chosen):
    scored = [
        Scored("", run(*row), run(*base) if base is not None else None)
        for row, base in zip(rows, alone or [None] * len(rows), strict=True)
    ]
    assert method(scored).index == chosen


def ask(prompt, choices, answers, **options):
    @rm.function
    def program(s):
        for step in prompt:
            s += step
        s += rm.select("x", choices, **options)
        s += " next" + rm.gen("after", max_tokens=4)

    backend = rm.ScriptedBackend({"after": " done", **answers})
    return program.run(backend=backend), backend


@pytest.mark.parametrize("method", [LENGTH, GREEDY, ALONE])
@pytest.mark.parametrize("choice", ["yes", "no", "not sure at all"])
def test_every_method_finds_a_clear_preference(method, choice):
    state, _ = ask(["Is it?"], ["yes", "no", "not sure at all"], {"x": choice}, choices_method=method)
    assert state["x"] == choice
    assert state.text() == f"Is it?{choice} next done"


def test_scores_can_be_scripted_and_are_told():
    scores = {"a": -2.0, "b": -1.5, "c": -1.75}
    state, _ = ask(["Pick:"], list(scores), {"x": scores})
    assert state["x"] == "b"
    meta = state.get_meta_info("x")
    assert meta["normalized_prompt_logprobs"] == [-2.0, -1.5, -1.75]
    assert [rows[-1][2] for rows in meta["input_token_logprobs"]] == ["a", "b", "c"]


def test_a_select_is_one_request():
    state, backend = ask(["One two three four:"], [" a", " b c"], {"x": " b c"})
    select, after = backend.requests
    assert select.prompt == ("One two three four:",)
    assert select.choices == Choices(texts=(" a", " b c"))
    assert (select.sampling.max_tokens, select.sampling.token_healing) == (0, True)
    assert after.prompt == ("One two three four:", tuple(backend.encode([" b c"])), " next")
    call = state.trace.children[0]
    assert (call.kind, call.requests, call.children) == ("select", 1, [])
    # The prompt and " b", which " c" follows; " a" and " c" are scored only.
    assert (call.usage.prompt_tokens, call.tokens_of_prompt) == (6, 5)
    assert [(text, score.tokens.texts) for text, score in call.choices] == [
        (" a", (" a",)),
        (" b c", (" b", " c")),
    ]


def test_a_select_finds_the_prompt_and_leaves_it():
    def program(s):
        s += "One two three four" + rm.gen("y")
        s += ":" + rm.select("x", [" a", " b c"]) + rm.gen("z")

    state = rm.function(program).run(backend=rm.ScriptedBackend({"y": " five", "x": " b c", "z": "."}))
    assert state.error() is None
    _, select, last = state.trace.children
    assert (select.usage.prompt_tokens, select.usage.cached_tokens) == (7, 5)
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (8, 7)


def test_a_choice_that_reaches_into_the_prompt_stays_text():
    state, backend = ask(["Answer: "], ["yes", "no"], {"x": "yes"})
    assert state["x"] == "yes"
    assert backend.requests[-1].prompt == ("Answer: yes next",)
    rows = state.get_meta_info("x")["input_token_logprobs"]
    assert [[row[2] for row in row_] for row_ in rows] == [[" yes"], [" no"]]


@pytest.mark.parametrize(
    "prompt", [[rm.user("Hi") + rm.assistant_begin()], ["Say", rm.gen("first"), rm.gen("second")]]
)
def test_after_a_chat_boundary_or_ids_no_choice_reaches_into_the_prompt(prompt):
    _, backend = ask(prompt, ["a", "b"], {"x": "b", "first": " one", "second": " two"})
    (select,) = [request for request in backend.requests if request.choices is not None]
    assert not select.sampling.token_healing
    after = backend.requests[-1].prompt
    assert after == (*select.prompt, tuple(backend.encode(["b"])), " next")


@pytest.mark.parametrize("prompt", [[], ["a"], ["a "], ["a:"]])  # "a" and the choice "No" are one token
@pytest.mark.parametrize("method", [LENGTH, GREEDY, ALONE])
@pytest.mark.parametrize("script", ["No", {"Yes": -1.0, "No": -0.9, "Yes sir": -1.0}])
def test_the_scripted_choice_is_selected_at_the_very_start(prompt, method, script):
    state, backend = ask(prompt, ["Yes", "Yes sir", "No"], {"x": script}, choices_method=method)
    assert state["x"] == "No"
    assert len(backend.requests) == 2


@pytest.mark.parametrize(
    "scores", [{}, {"a": -1}, {"a": -1, "b": None}, {"a": -1, "b": math.nan}, {"a": -1, "b": 1}]
)
def test_a_script_scores_each_choice(scores):
    with pytest.raises(rm.NotScripted, match=r"gives the choice '[ab]' the score"):
        ask(["Pick:"], ["a", "b"], {"x": scores})


def test_unconditional_scores_are_of_the_choice_alone():
    state, backend = ask(["Pick:"], ["a c", "b"], {"x": "b"}, choices_method=ALONE)
    assert backend.requests[0].choices == Choices(texts=("a c", "b"), unconditional=True)
    rows = state.get_meta_info("x")["unconditional_token_logprobs"]
    assert [[row[::2] for row in row_] for row_ in rows] == [[[-0.1, "a"], [-0.1, " c"]], [[-0.1, "b"]]]
    # "Pick", ":" and "a" behind them; and "a" alone.
    assert state.trace.children[0].usage.prompt_tokens == 4
    assert state.trace.children[0].tokens_of_prompt == 2


def test_gen_with_choices_is_a_select():
    program = program_of("Pick:" + rm.gen("x", choices=["a", "b"], choices_method=GREEDY, temperature=0))
    state = program.run(backend=rm.ScriptedBackend({"x": "b"}))
    assert state["x"] == "b"
    assert "greedy_logprob_matrix" in state.get_meta_info("x")


@pytest.mark.parametrize(
    ("make", "error", "field"),
    [
        (lambda: rm.select("x"), InvalidRequest, "choices"),
        (lambda: rm.select("x", []), InvalidRequest, "choices"),
        (lambda: rm.select("x", "ab"), InvalidRequest, "choices"),
        (lambda: rm.select("x", ["a", ""]), InvalidRequest, "choices"),
        (lambda: rm.select("x", ["a", 1]), InvalidRequest, "choices"),
        (lambda: rm.select("x", ["a"], temperature=0.5), UnsupportedField, "temperature"),
        (lambda: rm.gen("x", choices=["a"], temperature=0.5), UnsupportedField, "temperature"),
        (lambda: rm.gen("x", choices=["a"], max_tokens=5), UnsupportedField, "max_tokens"),
        (lambda: rm.gen("x", choices=["a"], top_p=0.5), UnsupportedField, "top_p"),
        (lambda: rm.gen("x", choices_method=GREEDY), InvalidRequest, "choices_method"),
    ],
)
def test_wrong_choices_are_refused_at_the_call(make, error, field):
    with pytest.raises(error) as refused:
        make()
    assert refused.value.field == field


def test_a_backend_that_fails_fails_the_step():
    class Failing(rm.ScriptedBackend):
        async def generate(self, request):
            raise OSError("disk")
            yield

    program = program_of("Pick:" + rm.select("x", ["a", "b", "c"]))
    state = program.run(backend=Failing({"x": "a"}))
    with pytest.raises(rm.ProgramError, match=r"select 'x' at .*test_select\.py:\d+ failed: disk"):
        state["x"]


@pytest.mark.parametrize("method", [LENGTH, ALONE])
def test_a_backend_that_does_not_score_fails_the_step(method):
    class Mute(rm.ScriptedBackend):
        async def generate(self, request):
            async for chunk in super().generate(request):
                scores = [msgspec.structs.replace(score, unconditional=None) for score in chunk.choices]
                yield msgspec.structs.replace(chunk, choices=tuple(scores) if method is ALONE else ())

    program = program_of("Pick:" + rm.select("x", ["a", "b"], choices_method=method))
    with pytest.raises(rm.ProgramError, match="no log-probabilities of the choices"):
        program.run(backend=Mute({"x": "a"}))["x"]
