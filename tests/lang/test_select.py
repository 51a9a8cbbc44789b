"""How choices are scored: the pure methods, the requests, and where a prompt meets a choice."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.choices import Scored
from ramify.lang.select import prompt_share
from ramify.messages import TokenLogprobs

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


@pytest.mark.parametrize(
    ("texts", "choice", "most", "share"),
    [
        ([":", " ", "Yes"], "Yes", 2, 2),  # nothing was changed
        ([":", " Yes"], "Yes", 2, 1),  # the space before went into the choice
        ([":Yes"], "Yes", 2, 0),
        (["er", ":", " Yes", " sir"], " Yes sir", 2, 2),
        (["er", ":", "Yes"], " Yes", 2, 2),  # a tokenizer that shows no space at the start of a token
        ([":", " ", "\ufffd", "\ufffd", "\ufffd"], "\u20ac", 2, 2),  # one letter in three tokens
        ([], "x", 0, 0),
        (["a", "b"], "xyzxyz", 2, 2),  # texts that tell nothing
    ],
)
def test_the_tokens_of_the_prompt_are_dropped(texts, choice, most, share):
    assert prompt_share(texts, choice, most) == share


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


def test_requests_of_a_select_after_text():
    _, backend = ask(["One two three four:"], [" a", " b c"], {"x": " b c"})
    prefix, first, second, after = backend.requests
    assert (prefix.sampling.max_tokens, prefix.sampling.prompt_logprobs_start) == (0, None)
    assert [request.sampling.prompt_logprobs_start for request in (first, second)] == [3, 3]
    assert [request.prompt for request in (first, second)] == [
        ("One two three four: a",),
        ("One two three four: b c",),
    ]
    assert after.prompt == ("One two three four:", tuple(backend.encode([" b c"])), " next")


def test_a_choice_that_reaches_into_the_prompt_stays_text():
    state, backend = ask(["Answer: "], ["yes", "no"], {"x": "yes"})
    assert state["x"] == "yes"
    assert backend.requests[-1].prompt == ("Answer: yes next",)
    rows = state.get_meta_info("x")["input_token_logprobs"]
    assert [[row[2] for row in row_] for row_ in rows] == [[" yes"], [" no"]]


@pytest.mark.parametrize(
    "prompt", [[rm.user("Hi") + rm.assistant_begin()], ["Say", rm.gen("first"), rm.gen("second")]]
)
def test_after_a_chat_boundary_or_ids_scoring_starts_at_the_choice(prompt):
    _, backend = ask(prompt, ["a", "b"], {"x": "b", "first": " one", "second": " two"})
    scored = [request for request in backend.requests if request.sampling.prompt_logprobs_start is not None]
    prefix = scored[0].prompt
    tokens = len(backend.encode(prefix)) - 1
    assert [request.sampling.prompt_logprobs_start for request in scored] == [tokens, tokens]


def test_a_select_at_the_very_start_has_no_prefix_request():
    state, backend = ask([], ["Yes sir", "No"], {"x": "No"})
    assert state["x"] == "No"
    assert len(backend.requests) == 3
    assert [request.sampling.prompt_logprobs_start for request in backend.requests[:2]] == [0, 0]


def test_unconditional_scores_are_of_the_choice_alone():
    _, backend = ask(["Pick:"], ["a", "b"], {"x": "b"}, choices_method=ALONE)
    bare = backend.requests[3:5]
    assert [backend.decode(request.prompt[0]) for request in bare] == ["a", "b"]


def test_gen_with_choices_is_a_select():
    @rm.function
    def program(s):
        s += "Pick:" + rm.gen("x", choices=["a", "b"], choices_method=GREEDY, temperature=0)

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


def test_a_failing_choice_cancels_the_others_and_fails_the_step():
    class Selective(rm.ScriptedBackend):
        async def generate(self, request):
            if self.prompt_text(request).endswith("b"):
                raise OSError("disk")
            async for chunk in super().generate(request):
                yield chunk

    @rm.function
    def program(s):
        s += "Pick:" + rm.select("x", ["a", "b", "c"])

    state = program.run(backend=Selective({"x": "a"}))
    with pytest.raises(rm.ProgramError, match=r"select 'x' at .*test_select\.py:\d+ failed: disk"):
        state["x"]


def test_a_backend_without_log_probabilities_fails_the_step():
    class Mute(rm.ScriptedBackend):
        def _score(self, prompt, start):
            return None

    @rm.function
    def program(s):
        s += "Pick:" + rm.select("x", ["a", "b"])

    with pytest.raises(rm.ProgramError, match="no log-probabilities of the prompt"):
        program.run(backend=Mute({"x": "a"}))["x"]
