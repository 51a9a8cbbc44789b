"""Programs as SGLang's users write them run with the import changed."""

from __future__ import annotations

import json

import pytest

import ramify as sgl


def test_few_shot_batch():
    @sgl.function
    def capital(s, country):
        s += "Q: What is the capital of Peru?\nA: Lima\n"
        s += "Q: What is the capital of " + country + "?\n"
        s += "A:" + sgl.gen("answer", stop="\n", temperature=0)

    backend = sgl.ScriptedBackend({"Japan": " Tokyo\nQ: more", "Kenya": " Nairobi\n"})
    sgl.set_default_backend(backend)
    try:
        states = capital.run_batch([{"country": "Japan"}, {"country": "Kenya"}], temperature=0.1)
        one = capital.run(country="Japan")
        called = capital("Kenya")
    finally:
        sgl.set_default_backend(None)
    assert [state["answer"] for state in states] == [" Tokyo", " Nairobi"]
    assert one["answer"] == " Tokyo"
    assert called.text().endswith("the capital of Kenya?\nA: Nairobi")


def test_multi_turn_chat():
    @sgl.function
    def chat(s, first, second):
        s += sgl.system("Be brief.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1"))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("answer_2")

    backend = sgl.ScriptedBackend({"answer_1": "One.", "answer_2": "Two."})
    state = chat.run(first="a?", second="b?", backend=backend, max_new_tokens=64)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "Two."},
    ]
    assert all(request.sampling.max_tokens == 64 for request in backend.requests)


def test_begin_and_end_forms_are_the_same_chat():
    @sgl.function
    def long_form(s):
        s += sgl.system_begin() + "Be brief." + sgl.system_end()
        s += sgl.user_begin()
        s += "Hi"
        s += sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("answer") + sgl.assistant_end()

    @sgl.function
    def short_form(s):
        s.system("Be brief.")
        s.user("Hi")
        s.assistant(sgl.gen("answer"))

    backend = sgl.ScriptedBackend({"answer": "Hello"})
    texts = {form.run(backend=backend).text() for form in (long_form, short_form)}
    assert texts == {
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    }


def test_json_by_dtypes_and_regexes():
    @sgl.function
    def city(s):
        with s.var_scope("json_output"):
            s += '{"name": ' + sgl.gen_string() + ', "population": ' + sgl.gen_int("population")
            s += ', "area": ' + sgl.gen(dtype=float, name="area")
            s += ', "coastal": ' + sgl.gen("coastal", regex="(true|false)") + "}"

    answers = ['"Paris"', "2102650 ", "105.4\n", "false"]
    state = city.run(backend=sgl.ScriptedBackend(answers))
    assert state["json_output"] == '{"name": "Paris", "population": 2102650, "area": 105.4, "coastal": false}'
    assert json.loads(state["json_output"])["population"] == 2102650
    assert (state["population"], state["area"]) == ("2102650", "105.4")


def test_parallel_encoding():
    @sgl.function
    def answer(s, contexts):
        s += "Statements:\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"{i}: " + contexts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += "Answer:" + sgl.gen("answer", 8)

    state = answer.run(["a", "b"], backend=sgl.ScriptedBackend([" ok"]))
    assert state.text() == "Statements:\n0: a\n1: b\nAnswer: ok"


def test_return_value_positional_arguments_and_bind():
    @sgl.function
    def add(s, a, b=2, *, c=3):
        s += f"{a}{b}{c}" + sgl.gen("x")
        return a + b + c

    backend = sgl.ScriptedBackend(lambda request: "!")
    assert add.run(1, backend=backend).ret_value == 6
    bound = add.bind(a=10, backend=backend, temperature=0.0)
    assert bound.run(c=0).ret_value == 12
    assert backend.requests[-1].sampling.temperature == 0.0
    assert add.arg_names == ["a", "b", "c"]
    with pytest.raises(TypeError, match="no parameter 'd'"):
        add.bind(d=1)
    with pytest.raises(TypeError, match="missing"):
        add.run(backend=backend)


def test_n_samples_are_a_list_and_the_first_goes_on():
    @sgl.function
    def draw(s):
        s += "x" + sgl.gen("y", n=3, seed=7) + "z"

    backend = sgl.ScriptedBackend({"y": ["a", "b", "c"]})
    state = draw.run(backend=backend)
    assert sorted(state["y"]) == ["a", "b", "c"]
    assert state.text() == f"x{state['y'][0]}z"
    assert [request.sampling.seed for request in backend.requests] == [7, 8, 9]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("y")] == [2, 2, 2]


def test_meta_info_has_sglangs_shape():
    @sgl.function
    def one(s):
        s += "Say a:" + sgl.gen("y", return_logprob=True, top_logprobs_num=1, logprob_start_len=0)

    meta = one.run(backend=sgl.ScriptedBackend([" a b"])).get_meta_info("y")
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 0)
    assert [text for _, _, text in meta["output_token_logprobs"]] == [" a", " b", "<|im_end|>"]
    assert [row[0] for row in meta["input_token_logprobs"]] == [None, -0.1, -0.1]
    assert meta["output_top_logprobs"][0][0][2] == " a"


def test_an_expression_cannot_hide_in_an_f_string():
    with pytest.raises(TypeError, match="f-string"):
        f"The answer is {sgl.gen('x')}"


@pytest.mark.parametrize(("item", "error"), [(None, ValueError), (3, TypeError), (["a"], TypeError)])
def test_only_text_and_expressions_are_appended(item, error):
    @sgl.function
    def append(s):
        s += item

    with pytest.raises(error):
        append.run(backend=sgl.ScriptedBackend([]))


def test_variables_can_be_set_and_asked_for():
    @sgl.function
    def program(s):
        s["given"] = [1, 2]
        s.set_var("text", "t")
        assert "given" in s
        assert "other" not in s
        with s.copy() as branch:
            branch += "x" + sgl.gen("y")

    state = program.run(backend=sgl.ScriptedBackend(["!"]))
    assert (state["given"], state.get_var("text"), state["y"]) == ([1, 2], "t", ["!"])
