"""Options: SGLang's spellings map to fields of SamplingParams, and unknown options are refused by name."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.errors import InvalidConstraint, InvalidRequest, UnsupportedField
from ramify.sampling_options import NAMES, SPELLINGS, read_options
from ramify.sampling_params import SamplingParams
from tests.lang.steps import program_of


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"temperature": None, "stop": None}, {}),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"max_tokens": 5, "min_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"stop_token_ids": [1]}, {"stop_token_ids": [1]}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 4, "top_p": 0.5, "min_p": 0.1}, {"top_k": 4, "top_p": 0.5, "min_p": 0.1}),
        ({"sampling_seed": 3}, {"seed": 3}),
        ({"ignore_eos": True, "n": 2}, {"ignore_eos": True, "n": 2}),
        (
            {"frequency_penalty": 1, "presence_penalty": 1.5},
            {"frequency_penalty": 1, "presence_penalty": 1.5},
        ),
        (
            {"repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
            {"repetition_penalty": 1.1, "logit_bias": {5: 1.0}},
        ),
        ({"return_logprob": True}, {"logprobs": 0}),
        ({"return_logprob": True, "top_logprobs_num": 3}, {"logprobs": 3}),
        ({"return_logprob": True, "logprob_start_len": 7}, {"logprobs": 0, "prompt_logprobs_start": 7}),
        ({"return_logprob": True, "logprob_start_len": -1}, {"logprobs": 0}),
        ({"return_logprob": False, "top_logprobs_num": 0, "return_text_in_logprobs": True}, {}),
    ],
)
def test_spellings(given, meant):
    assert read_options(given, of="gen") == meant


@pytest.mark.parametrize(
    ("given", "error", "field"),
    [
        ({"stop_regex": "a"}, UnsupportedField, "stop_regex"),
        ({"colour": 1}, UnsupportedField, "colour"),
        ({"return_text_in_logprobs": False}, UnsupportedField, "return_text_in_logprobs"),
        ({"top_logprobs_num": 2}, InvalidRequest, "top_logprobs_num"),
        ({"logprob_start_len": 2}, InvalidRequest, "logprob_start_len"),
        ({"temperature": "hot"}, InvalidRequest, "temperature"),
        ({"temperature": -1.0}, InvalidRequest, "temperature"),
        ({"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 1.5}, InvalidRequest, "max_tokens"),
        ({"stop": [1]}, InvalidRequest, "stop"),
        ({"stop": ""}, InvalidRequest, "stop"),
        ({"n": 0}, InvalidRequest, "n"),
    ],
)
def test_wrong_options_are_refused_where_they_are_written(given, error, field):
    for call in (lambda: rm.gen("x", **given), lambda: read_options(given, of="gen")):
        with pytest.raises(error) as refused:
            call()
        assert refused.value.field == field


def test_an_engine_takes_the_options_of_gen(engine):
    completion = engine.complete("a", max_new_tokens=2, sampling_seed=1, stop="zz", ignore_eos=True)
    assert completion.usage.completion_tokens == 2


@pytest.mark.parametrize("call", ["complete", "complete_many"])
def test_an_engine_refuses_an_option_by_name(engine, call):
    for wrong, error in (({"colour": 1}, UnsupportedField), ({"max_tokens": "4"}, InvalidRequest)):
        with pytest.raises(error) as refused:
            getattr(engine, call)(["a", "b"], **wrong)
        assert [refused.value.field] == list(wrong)


def test_every_sampling_field_is_an_option():
    assert set(SamplingParams.__struct_fields__) <= NAMES
    assert set(SPELLINGS.values()) <= set(SamplingParams.__struct_fields__)


def test_a_gen_wins_over_the_run_and_the_run_over_the_default():
    program = program_of("a" + rm.gen("x") + rm.gen("y", 7, temperature=0.5, stop="!"))
    backend = rm.ScriptedBackend({"x": "b", "y": "c"})
    program.run(backend=backend, temperature=0.9, top_p=0.8, cache_scope="tenant")
    first, second = (request.sampling for request in backend.requests)
    assert (first.max_tokens, first.temperature, first.top_p) == (128, 0.9, 0.8)
    assert (second.max_tokens, second.temperature, second.top_p, second.stop) == (7, 0.5, 0.8, ("!",))
    assert [request.scope for request in backend.requests] == ["tenant", "tenant"]


def test_a_program_may_have_parameters_with_the_names_of_options():
    @rm.function
    def program(s, temperature, n=1):
        s += f"{temperature} {n}" + rm.gen("x")

    backend = rm.ScriptedBackend(["b"])
    assert program.run(temperature="hot", n=9, backend=backend).text() == "hot 9b"
    assert backend.requests[0].sampling.temperature == 1.0


def test_a_run_refuses_what_neither_it_nor_the_program_knows():
    @rm.function
    def program(s, a):
        s += a

    backend = rm.ScriptedBackend([])
    for wrong in ("colour", "use_thread", "stop_regex"):
        with pytest.raises(TypeError, match=wrong):
            program.run("a", backend=backend, **{wrong: 1})


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"regex": "[ab]+"}, "regex", "[ab]+"),
        ({"json_schema": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structural_tag": {"a": 1}}, "structural_tag", '{"a": 1}'),
        ({"dtype": int}, "regex", r"[-+]?[0-9]+[ \n]*"),
        ({"dtype": "bool"}, "regex", "(True|False)"),
    ],
)
def test_constraints_whose_value_stays_text(given, kind, source):
    step = rm.gen("x", **given)
    constraint = step.node.constraint
    assert (constraint.kind, constraint.source) == (kind, source)
    assert step.parse("as it is") == "as it is"


@pytest.mark.parametrize(
    ("given", "error", "field"),
    [
        ({"regex": "a", "schema": int}, InvalidConstraint, "regex"),
        ({"dtype": int, "regex": "a"}, InvalidConstraint, "regex"),
        ({"choices": ["a"], "schema": int}, InvalidConstraint, "choices"),
        ({"dtype": list}, InvalidConstraint, "dtype"),
        ({"dtype": "complex"}, InvalidConstraint, "dtype"),
        ({"regex": ""}, InvalidConstraint, "regex"),
        ({"grammar": ""}, InvalidConstraint, "grammar"),
        ({"json_schema": {1: print}}, InvalidConstraint, "json_schema"),
        ({"json_schema": "x" * (1 << 21)}, InvalidConstraint, "json_schema"),
        ({"schema": print}, InvalidConstraint, "schema"),
        ({"schema": dict, "any_order": 1}, InvalidConstraint, "any_order"),
        ({"timeout": "soon"}, InvalidRequest, "timeout"),
        ({"timeout": True}, InvalidRequest, "timeout"),
        ({"timeout": 0}, InvalidRequest, "timeout"),
        ({"lora": 3}, InvalidRequest, "lora"),
        ({"name": 3}, InvalidRequest, "name"),
        ({"retries": None}, InvalidRequest, "retries"),
        ({"retries": "twice"}, InvalidRequest, "retries"),
        ({"retries": -1}, InvalidRequest, "retries"),
        ({"keep_failed": True}, InvalidRequest, "keep_failed"),
        ({"choices": ["a", "b"], "temperature": "hot"}, InvalidRequest, "temperature"),
        ({"choices": ["a"], "retries": 1}, UnsupportedField, "retries"),
        ({"choices": ["a"], "validate": print}, UnsupportedField, "validate"),
        ({"choices": ["a"], "thinking": True}, UnsupportedField, "thinking"),
        ({"thinking": 5}, InvalidRequest, "thinking"),
        ({"thinking": {"max_tokens": -1}}, InvalidRequest, "thinking.max_tokens"),
        ({"thinking": {"max_tokens": "x"}}, InvalidRequest, "thinking"),
        ({"thinking": {"budget": 4}}, UnsupportedField, "thinking.budget"),
    ],
    ids=lambda given: f"{given!s:.40}",
)
def test_wrong_arguments_of_a_gen_are_refused_by_name(given, error, field):
    with pytest.raises(error) as refused:
        rm.gen(**given)
    assert refused.value.field == field
