"""The scripted backend keeps its script, its constraints, and an exact prefix cache."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.lang.backends.base import Backend


@rm.function
def ask(s, question="Q:", **options):
    s += question + rm.gen("x", **options)


def answered(answers, **options):
    return ask.run(backend=rm.ScriptedBackend(answers), **options)


def test_it_is_a_backend():
    assert isinstance(rm.ScriptedBackend([]), Backend)


@pytest.mark.parametrize(
    "answers",
    [
        {"x": "a"},
        {"x": ["a"]},
        {"^Q": "a"},
        {"nothing": "b", "Q:$": "a", "Q": "c"},
        ["a"],
        lambda request: "a",
        {"x": lambda request: "a"},
        {"x": [lambda request: "a"]},
    ],
)
def test_answers_by_name_by_prompt_in_order_or_by_function(answers):
    assert answered(answers)["x"] == "a"


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        ({"y": "a"}, {}, "has no answer for 'x'"),
        ([], {}, "0 answers are used up"),
        ({"x": []}, {}, "0 answers for 'x' are used up"),
        ({"x": 3}, {}, "answers with 3, which is no text"),
        (["d"], {"regex": "[abc]"}, "breaks its regex"),
        (["d"], {"json_schema": {"type": "object"}}, "breaks its json_schema"),
        (["[]"], {"json_schema": {"type": "object"}}, "breaks its json_schema"),
        (["maybe"], {"schema": bool}, "breaks its choices"),
        (["a"], {"ebnf": 'root ::= "a"'}, "cannot check a constraint of kind ebnf"),
        (["1 2 3"], {"regex": "[1-3 ]+", "max_tokens": 2}, "has 3 tokens; max_tokens is 2"),
        (["a"], {"min_tokens": 3}, "has 2 tokens; min_tokens is 3"),
        (["a"], {"ignore_eos": True}, "no ignore_eos"),
        (["a"], {"stop_token_ids": [3]}, "no stop_token_ids"),
        (["a"], {"logit_bias": {3: 1.0}}, "no logit_bias"),
    ],
)
def test_a_script_that_does_not_fit_fails_the_step(answers, options, message):
    @rm.function
    def program(s):
        s += "Q:" + rm.gen("x", **options)

    with pytest.raises(rm.ProgramError, match=message):
        program.run(backend=rm.ScriptedBackend(answers))["x"]


def test_a_select_of_what_is_no_choice():
    @rm.function
    def program(s):
        s += "Q:" + rm.select("x", ["a", "b"])

    with pytest.raises(rm.ProgramError, match="'c', which is none of the choices"):
        program.run(backend=rm.ScriptedBackend({"x": "c"}))["x"]


@pytest.mark.parametrize(
    ("answer", "options", "text", "reason", "matched", "kept"),
    [
        ("one two", {}, "one two", "stop", 0, 2),
        ("one two three", {"max_tokens": 2}, "one two", "length", None, 2),
        ("one two", {"max_tokens": 2}, "one two", "length", None, 2),
        ("one two", {"stop": " two"}, "one", "stop", " two", 1),
        ("one two", {"stop": "wo"}, "one t", "stop", "wo", 1),  # inside a token
        ("one, two", {"stop": ["x", "e, t"]}, "on", "stop", "e, t", 0),
        ("one", {"stop": "one"}, "", "stop", "one", 0),
        ("", {}, "", "stop", 0, 0),
    ],
)
def test_how_an_output_ends(answer, options, text, reason, matched, kept):
    @rm.function
    def program(s):
        s += "Q:" + rm.gen("x", **options) + " more" + rm.gen("y")

    backend = rm.ScriptedBackend({"x": answer, "y": "z"})
    state = program.run(backend=backend)
    assert state["x"] == text
    finish = state.get_meta_info("x")["finish_reason"]
    assert (finish["type"], finish.get("matched")) == (reason, matched)
    following = backend.requests[1].prompt
    ids = tuple(backend.encode([answer])[:kept])
    tail = text.removeprefix(backend.decode(ids))
    assert following == (("Q:", ids, f"{tail} more") if ids else (f"Q:{tail} more",))


def test_the_cache_is_exact_and_scoped():
    backend = rm.ScriptedBackend(lambda request: " answer")

    def usage(prompt, **options):
        state = ask.run(prompt, backend=backend, **options)
        return state.usage.prompt_tokens, state.usage.cached_tokens

    assert usage("a b c d") == (4, 0)
    assert usage("a b c d") == (4, 3)  # the last token is computed for its logits
    assert usage("a b c x") == (4, 3)
    assert usage("a b x y") == (4, 2)
    assert usage("a b c d answer e") == (6, 5)  # outputs are cached as well
    assert usage("a b c d", cache_scope="other") == (4, 0)
    assert rm.flush_cache(backend) is True
    assert usage("a b c d") == (4, 0)


def test_what_a_backend_does_not_have_is_refused():
    with pytest.raises(rm.UnsupportedField, match="ScriptedBackend has no get_server_info"):
        rm.get_server_info(rm.ScriptedBackend([]))


def test_a_prompt_that_is_too_long():
    with pytest.raises(rm.ProgramError, match="context is 100") as failed:
        ask.run("a " * 50, backend=rm.ScriptedBackend(["b"], context_length=100))["x"]
    assert failed.value.__cause__.code == "context_length_exceeded"


def test_tokens_and_texts_are_inverse():
    backend = rm.ScriptedBackend([])
    for text in (
        "<|im_start|>user\nHi there!\n\n  x = 3.14 <|im_end|>\n",
        " \n",
        "naïve 😀 日本",
        "a  b   c",
    ):
        assert backend.decode(backend.encode([text])) == text
