"""Thinking in programs: prompts as the chat templates render them, thoughts apart from answers."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import ramify as rm
from ramify.errors import InvalidRequest, Overloaded, UnsupportedField, UnsupportedNode
from ramify.lang.prompt.thinking import PLAIN, ThoughtSplitter
from ramify.messages import (
    Finish,
    Preamble,
    TextChunk,
    Thinking,
    Usage,
)
from ramify.model_info import ThinkingFormat
from ramify.retry import Retry
from tests.lang.backends import Breaking
from tests.lang.chat_templates import THINKING, pieces_of, rendered
from tests.lang.remote import RawServer, ScriptedFrontend, answer
from tests.lang.steps import add, program_of
from tests.server.fake_frontend import LiveServer


def script(name: str, thoughts: str, answer: str) -> str:
    marks = pieces_of(name).thinking or PLAIN
    return f"{marks.start}{thoughts}{marks.end}{marks.gap}{answer}"


# --- the prompts, with the template's own rendering as the oracle ---


@pytest.mark.parametrize("name", [*THINKING, "smollm2"])
def test_every_prompt_of_a_chat_that_thinks_is_the_templates(name):
    """The mark that begins the thoughts stands in the prompt; some models write it themselves."""

    @rm.function
    def chat(s):
        s += rm.system("Be brief.")
        for turn in range(4):
            s += rm.user(f"Question {turn}?")
            s += rm.assistant(rm.gen("answer", thinking=True))
            assert s["answer"] == "It is so."
            assert s.thinking("answer") == "Hm, hm."

    pieces = pieces_of(name)
    marks = pieces.thinking or PLAIN
    text = script(name, "Hm, hm.", "It is so.")
    backend = rm.ScriptedBackend(lambda request: text, chat_format=pieces)
    state = chat.run(backend=backend)
    assert state.error() is None
    messages: list[dict[str, Any]] = state.messages()
    assert [turn["content"] for turn in messages[2::2]] == ["It is so."] * 4
    if marks.kept == "always":
        messages = [
            {**turn, "reasoning_content": "Hm, hm."} if turn["role"] == "assistant" else turn
            for turn in messages
        ]
    for turn, request in enumerate(backend.requests):
        wanted = rendered(name, messages[: 2 * turn + 2], enable_thinking=True, thinking=True)
        found = backend.prompt_text(request)
        assert found in (wanted, wanted + marks.start, wanted + marks.on)
        assert found.endswith(marks.start)


@pytest.mark.parametrize("name", THINKING)
def test_every_prompt_of_a_chat_that_does_not_think_is_the_templates(name):
    @rm.function
    def chat(s):
        for turn in range(3):
            s += rm.user(f"Question {turn}?")
            s += rm.assistant(rm.gen("answer", thinking=False))
            assert s.thinking("answer") == ""

    pieces = pieces_of(name)
    backend = rm.ScriptedBackend(lambda request: "It is so.", chat_format=pieces)
    messages = chat.run(backend=backend).messages()
    for turn, request in enumerate(backend.requests):
        wanted = rendered(name, messages[: 2 * turn + 1], enable_thinking=False, thinking=False)
        found = backend.prompt_text(request)
        if name == "glm-4.5":  # the template writes "/nothink" into the user turns, which are sent by then
            wanted = wanted.replace("/nothink", "") + "\n"
        if name == "deepseek-r1":  # always thinks: its thoughts are left empty
            wanted += "\n</think>\n\n"
        if name == "gpt-oss":  # has no switch: the model is put into the channel of answers
            wanted += "<|channel|>final<|message|>"
        assert found == wanted
        assert request.preambles == ()


def test_thoughts_stay_while_tools_are_called_where_the_template_has_it_so():
    """Qwen 3 drops thoughts at the next user turn, and not before."""
    pieces = pieces_of("qwen3")

    @rm.function
    def agent(s):
        s += rm.system("Be brief.", tools=[add])
        s += rm.user("1 + 2?")
        s += rm.assistant(rm.gen("plan", thinking=True))
        s.call_tools([add], "calls")
        s += rm.assistant(rm.gen("answer"))
        s += rm.user("Sure?") + rm.assistant(rm.gen("sure"))

    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    answers = {
        "plan": "<think>Hm.\n</think>I add.",
        "calls": f"\n{call}\n</tool_call>",
        "answer": "3",
        "sure": "Yes.",
    }
    backend = rm.ScriptedBackend(answers, chat_format=pieces)
    state = agent.run(backend=backend)
    assert state.error() is None
    _, calls, answer, sure = map(backend.prompt_text, backend.requests)
    for prompt in (calls, answer):
        assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI add.<|im_end|>" in prompt
    assert "Hm." not in sure
    assert "<|im_start|>assistant\nI add.<|im_end|>\n<|im_start|>assistant\n<tool_call>" in sure


def test_thoughts_stay_within_their_turn():
    two = program_of(
        rm.user("?"),
        rm.assistant(rm.gen("a", thinking=True) + " So " + rm.gen("b", thinking=True) + rm.gen("c")),
        rm.user("!") + rm.assistant(rm.gen("d")),
    )
    answers = {"a": "<think>A.</think>1", "b": "<think>B.</think>2", "c": "3", "d": "4"}
    backend = rm.ScriptedBackend(answers)
    state = two.run(backend=backend)
    third, last = map(backend.prompt_text, backend.requests[2:])
    assert third.endswith("<think>\nA.</think>\n\n1 So <think>\nB.</think>\n\n2")
    assert "<think>" not in last
    assert "<|im_start|>assistant\n1 So 23<|im_end|>" in last
    assert state.messages()[1]["content"] == "1 So 23"


def test_what_was_generated_goes_on_as_its_tokens():
    chat = program_of(
        rm.user("?") + rm.assistant(rm.gen("a", thinking=True) + rm.gen("b")),
        rm.user("!") + rm.assistant(rm.gen("c")),
    )
    backend = rm.ScriptedBackend({"a": "<think>Let me see.</think>A b c.", "b": " d", "c": "e"})
    chat.run(backend=backend)
    first, second, third = (request.prompt for request in backend.requests)
    thoughts, answer = second[1], second[2]
    assert backend.decode(thoughts) == "Let me see.</think>\n\n"
    assert backend.decode(answer) == "A b c."
    assert first == (second[0],)
    assert answer in third
    assert thoughts not in third
    kept = backend.encode(third[:1])
    assert backend.encode(first)[: len(kept)] == kept


def test_branches_that_part_after_thoughts():
    """A fork divides a turn: its thoughts leave each branch, and the join appends the rest of each."""

    @rm.function
    def parted(s):
        s += rm.user("?") + rm.assistant_begin() + rm.gen("a", thinking=True)
        forks = s.fork(2)
        forks += " or " + rm.gen("b") + rm.assistant_end() + rm.user("!") + rm.assistant(rm.gen("c"))
        forks.join("concate_and_append")

    answers = {"a": "<think>Hm.</think>A", "b": "B", "c": "C"}
    backend = rm.ScriptedBackend(answers)
    state = parted.run(backend=backend)
    assert state.error() is None
    later = [text for text in map(backend.prompt_text, backend.requests) if text.count("user") == 2]
    assert len(later) == 2
    assert not any("Hm." in text for text in later)
    added = " or B<|im_end|>\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n"
    assert state.text().endswith("<think>\nHm.</think>\n\nA" + added * 2)


def test_without_turns_everything_is_one_turn():
    plain = program_of("2 + 2 = " + rm.gen("a", thinking=True, regex="[0-9]") + ", 3 + 3 = " + rm.gen("b"))
    backend = rm.ScriptedBackend({"a": "<think>Hm.</think>4", "b": "6"}, chat_format=None)
    state = plain.run(backend=backend)
    assert state["a"] == "4"
    assert backend.prompt_text(backend.requests[1]) == "2 + 2 = <think>\nHm.</think>\n\n4, 3 + 3 = "


@pytest.mark.parametrize(("home", "other"), [("qwen3", "smollm2"), ("qwen3", "keeping")])
def test_other_models_are_not_shown_the_thoughts(home, other):
    """Each model has its own template, which may keep the model's own thoughts."""
    own = rm.ScriptedBackend(
        {"a": script(home, "Mine.", "A."), "c": "C.", "e": "E."}, chat_format=pieces_of(home)
    )
    big = rm.ScriptedBackend(
        {"b": script(other, "Deep.", "B."), "d": script(other, "Deeper.", "D.")}, chat_format=pieces_of(other)
    )

    chat = program_of(
        rm.user("1?") + rm.assistant(rm.gen("a", thinking=True)),
        rm.user("2?") + rm.assistant(rm.gen("b", thinking=True, backend=big) + rm.gen("c", thinking=True)),
        rm.user("3?") + rm.assistant(rm.gen("d", thinking=True, backend=big)),
        rm.user("4?") + rm.assistant(rm.gen("e")),
    )
    state = chat.run(backend=own)
    assert state.error() is None
    assert [state.thinking(name) for name in "abd"] == ["Mine.", "Deep.", "Deeper."]
    turns = [turn["content"] for turn in state.messages()]
    assert turns == ["1?", "A.", "2?", "B.C.", "3?", "D.", "4?", "E."]
    said = [
        {"role": role, "content": content}
        for role, content in zip(["user", "assistant"] * 4, turns, strict=True)
    ]
    kept = other == "keeping"
    first, second = map(big.prompt_text, big.requests)
    last = own.prompt_text(own.requests[-1])
    assert "Mine." not in first + second
    assert "Deep" not in "".join(map(own.prompt_text, own.requests))
    assert ("Deep." in second) is kept
    if not kept:
        for prompt, name, count in ((first, other, 3), (second, other, 5), (last, home, 7)):
            wanted = rendered(name, said[:count], enable_thinking=True)
            assert prompt.startswith(wanted)
            assert len(prompt) - len(wanted) <= len("\n<think>\n")


# --- answers ---


class City(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("given", "answer", "value"),
    [
        ({}, "Ghent.", "Ghent."),
        ({"schema": City}, '{"name": "Ghent"}', City(name="Ghent")),
        ({"schema": Literal["Ghent", "Delft"]}, "Ghent", "Ghent"),
        ({"regex": "G[a-z]+"}, "Ghent", "Ghent"),
        ({"dtype": int}, "12\n", "12"),
        ({"stop": ["t."]}, "Ghent.", "Ghen"),
        ({"max_tokens": 2}, "Ghent is it", "Ghent is"),
    ],
)
def test_all_kinds_of_answers(given, answer, value):
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", thinking={"max_tokens": 6}, **given)))
    backend = rm.ScriptedBackend([f"<think>In t. Belgium\n12 or elsewhere, I think</think>{answer}"])
    state = ask.run(backend=backend)
    assert state["x"] == value
    assert state.thinking("x") == "In t. Belgium\n12"
    (request,) = backend.requests
    assert request.preambles == (
        Preamble(end="</think>", max_tokens=6, apart=True),
        Preamble(end="\n\n", max_tokens=0, apart=True),
    )


def test_several_outputs():
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", n=2, thinking=True)) + rm.user("!"))
    state = ask.run(backend=rm.ScriptedBackend({"x": ["<think>A.</think>1", "<think>B.</think>2"]}))
    assert state["x"] == ["1", "2"]
    assert state.thinking("x") == ["A.", "B."]
    assert state.text().endswith("assistant\n1<|im_end|>\n<|im_start|>user\n!<|im_end|>\n")


@pytest.mark.parametrize("keep", [False, True])
def test_retries_think_again(keep):
    @rm.function
    def ask(s):
        s += rm.user("?")
        s += rm.assistant(rm.gen("x", schema=int, thinking=True, retries=1, validate=check, keep_failed=keep))
        s += rm.user("!") + rm.assistant(rm.gen("y"))

    def check(value: int) -> None:
        if value > 5:
            raise ValueError("That is too much.")

    backend = rm.ScriptedBackend({"x": ["<think>Many.</think>9", "<think>Few.</think>3"], "y": "ok"})
    state = ask.run(backend=backend)
    assert (state["x"], state.thinking("x"), state["y"]) == (3, "Few.", "ok")
    _, again, last = map(backend.prompt_text, backend.requests)
    assert "Many." not in again
    assert "assistant\n9<|im_end|>" in again
    assert again.endswith(
        "too much.\nGive the whole answer again, corrected.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert "Few." not in last
    assert ("too much" in last) is keep
    assert last.endswith("assistant\n3<|im_end|>\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_that_does_not_think():
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", thinking=True) + rm.gen("y")))
    state = ask.run(backend=rm.ScriptedBackend({"x": "4", "y": "5"}))
    assert (state["x"], state.thinking("x")) == ("4", "")
    with pytest.raises(InvalidRequest, match="says nothing about thinking"):
        state.thinking("y")
    with pytest.raises(rm.ProgramError, match="no variable 'z'"):
        state.thinking("z")


def test_effort_is_refused_where_there_is_none():
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", thinking={"effort": "low"})))
    error = ask.run(backend=rm.ScriptedBackend(["a"])).error()
    assert "scripted has no setting of effort" in str(error)


# --- streams and traces ---


@rm.function
def asked(s):
    s += rm.user("?") + rm.assistant(rm.gen("x", thinking=True))


SAID = ["<think>\nTwo and\ntwo. \n</think>\n\nFour it is."]


def test_thoughts_and_answer_are_streamed_apart():
    state = asked.run(backend=rm.ScriptedBackend(SAID), stream=True)
    thoughts = list(state.text_iter("x", thinking=True))
    answer = list(state.text_iter("x"))
    assert thoughts == ["Two", " and", "\ntwo", "."]
    assert answer == ["Four", " it", " is", "."]
    whole = "".join(state.text_iter())
    assert whole.endswith("<|im_start|>assistant\nFour it is.<|im_end|>\n")
    quiet = asked.run(backend=rm.ScriptedBackend(SAID))
    assert list(quiet.text_iter("x", thinking=True)) == ["Two and\ntwo."]


async def test_thoughts_are_streamed_in_an_event_loop():
    @rm.function
    async def ask(s):
        s += rm.user("?") + rm.assistant(rm.gen("x", thinking=True))
        found = [text async for text in s.text_async_iter("x", thinking=True)]
        metas = [meta async for _, meta in s.text_async_iter("x", True, thinking=True)]
        assert await s.aget("x") == "Four it is."
        assert len(metas) == len(found)
        return found, s.thinking("x")

    state = await ask.run(backend=rm.ScriptedBackend(SAID), stream=True)
    await state.wait()
    assert state.ret_value == (["Two", " and", "\ntwo", "."], "Two and\ntwo.")


def test_asking_for_thoughts_of_a_step_without_is_an_error():
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x")))
    state = ask.run(backend=rm.ScriptedBackend(["a b c"]), stream=True)
    with pytest.raises(InvalidRequest, match="says nothing about thinking"):
        list(state.text_iter("x", thinking=True))
    with pytest.raises(InvalidRequest, match="needs the name"):
        list(state.text_iter(thinking=True))


def test_typed_values_are_streamed_without_the_thoughts():
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", schema=City, thinking=True)))
    answer = '<think>{"name": "not this"}</think>{"name": "Ghent"}'
    state = ask.run(backend=rm.ScriptedBackend([answer]), stream=True)
    *_, last = state.stream_objects("x", City)
    assert last.value == City(name="Ghent")


def test_traces_and_usage():
    backend = rm.ScriptedBackend(SAID, chat_format=pieces_of("qwen3"))
    state = asked.run(backend=backend)
    (call,) = state.trace.children
    assert (call.text, call.thinking) == ("Four it is.", "Two and\ntwo.")
    assert call.output == "Two and\ntwo. \n</think>\n\nFour it is."
    thoughts, answer = (len(backend.encode([text])) for text in (call.before, call.text))
    assert state.usage.reasoning_tokens in (thoughts, thoughts + 1), "the end mark is encoded by itself"
    assert state.usage.completion_tokens == state.usage.reasoning_tokens + answer + 1
    assert 0 < state.usage.reasoning_tokens < state.usage.completion_tokens
    assert f"(forced 0, thinking {state.usage.reasoning_tokens})" in str(state.trace)
    data = state.trace.to_dict()["children"][0]
    assert data["thinking"] == "Two and\ntwo."
    assert data["text"] == "Four it is."
    assert data["reasoning_tokens"] == state.usage.reasoning_tokens
    assert state.get_meta_info("x")["reasoning_tokens"] == state.usage.reasoning_tokens


def test_the_report_shows_thoughts_apart():
    from ramify.lang.trace.report import report_data

    state = asked.run(backend=rm.ScriptedBackend(SAID))
    (call,) = report_data(state.trace)["root"]["children"]
    assert (call["thinking"], call["text"]) == ("Two and\ntwo.", "Four it is.")
    assert "".join(span[0] for span in call["spans"]) == "Four it is."
    assert call["thought"] == state.usage.reasoning_tokens


# --- the splitter, for tokens that cross borders ---

TEXT = " So.</thin \n\n</think>\n\nFour."


@pytest.mark.parametrize("marks", [PLAIN, ThinkingFormat(gap="")])
@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_the_border_may_lie_anywhere_in_a_chunk(size, marks):
    splitter = ThoughtSplitter(marks)
    parts = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    chunks = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        chunk = TextChunk(
            rid="r",
            text=part,
            ids=(index,),
            usage=Usage(completion_tokens=index + 1),
            finish=Finish(reason="stop") if last else None,
        )
        chunks.append(splitter.push(chunk))
    assert "".join(chunk.reasoning for chunk in chunks) == "So.</thin"
    assert "".join(chunk.text for chunk in chunks) == ("" if marks.gap else "\n\n") + "Four."
    assert splitter.before + splitter.head == "".join(parts[: splitter.ids])
    assert splitter.before == " So.</thin \n\n</think>" + marks.gap
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.reasoning_tokens == splitter.ids


@pytest.mark.parametrize("piece", ["word ", "\n", "</thin"])
def test_text_that_begins_no_end_mark_is_not_held_back(piece):
    splitter = ThoughtSplitter(PLAIN)
    shown = ""
    for count in range(1, 101):
        shown += splitter.push(TextChunk(rid="r", text=piece)).reasoning
        if piece.strip():  # white space waits for the text behind it
            assert count * len(piece) - len(shown) <= len(PLAIN.end)
    assert splitter.before == piece * 100
    shown += splitter.push(TextChunk(rid="r", text="!</think>\n\nYes.")).reasoning
    assert shown == (piece * 100 + "!").strip()


# --- compiled programs ---


@rm.function
def reasons(s, question: str):
    s += rm.user(question) + rm.assistant(rm.gen("x", schema=int, thinking={"max_tokens": 9}))
    why = s.thinking("x")
    s += rm.user("You thought: " + why) + rm.assistant(rm.gen("y"))
    return s["x"], why, s["y"]


def test_a_compiled_program_thinks():
    answers = {"x": ["<think>Two.</think>4"] * 2, "y": ["ok"] * 2}
    stepwise, compiled = (rm.ScriptedBackend(answers) for _ in range(2))
    plain = reasons.run(question="2 + 2?", backend=stepwise)
    graph = reasons.compile()
    run = graph.run(question="2 + 2?", backend=compiled)
    assert run.ret_value == plain.ret_value == (4, "Two.", "ok")
    assert [request.prompt for request in compiled.requests] == [
        request.prompt for request in stepwise.requests
    ]
    assert "Two." in compiled.prompt_text(compiled.requests[1])
    assert run.thinking("x") == "Two."
    (node,) = [node for node in graph.graph().graph.nodes if getattr(node, "name", "") == "x"]
    assert node.thinking == Thinking(max_tokens=9)


# --- SGLang's programs ---


def test_separate_reasoning():
    @rm.function
    def qa(s, question):
        s += rm.user(question)
        s += rm.assistant(rm.separate_reasoning(rm.gen("answer", max_tokens=32), model_type="qwen3"))
        return s["answer"], s["answer_reasoning_content"]

    backend = rm.ScriptedBackend(["<think>Two and two.</think>4"])
    state = qa.run("2 + 2?", backend=backend)
    assert state.ret_value == ("4", "Two and two.")
    assert state["answer_reasoning_content"] == state.thinking("answer") == "Two and two."
    assert state.text().endswith("assistant\n4<|im_end|>\n")
    (request,) = backend.requests
    assert (request.sampling.max_tokens, request.preambles[0].max_tokens) == (32, 32)
    compiled = qa.compile().run("2 + 2?", backend=rm.ScriptedBackend(["<think>Two and two.</think>4"]))
    assert compiled.ret_value == ("4", "Two and two.")


def test_separate_reasoning_of_several():
    qa = program_of(
        rm.user("?") + rm.assistant_begin(),
        rm.separate_reasoning(rm.gen("a") + ", " + rm.gen("b"), model_type="deepseek-r1"),
        rm.assistant_end(),
    )
    state = qa.run(backend=rm.ScriptedBackend({"a": "<think>A.</think>1", "b": "<think>B.</think>2"}))
    assert [state[f"{name}_reasoning_content"] for name in "ab"] == ["A.", "B."]
    assert state.messages()[-1]["content"] == "1, 2"


@pytest.mark.parametrize(
    ("expression", "model_type", "error", "said"),
    [
        (rm.gen("a"), None, UnsupportedField, "model_type"),
        (rm.gen("a"), "qwen4", UnsupportedField, "Did you mean qwen3"),
        (rm.gen(), "qwen3", InvalidRequest, "a name"),
        (rm.select("a", ["b", "c"]), "qwen3", UnsupportedNode, "does not think"),
    ],
)
def test_separate_reasoning_refuses_by_name(expression, model_type, error, said):
    with pytest.raises(error, match=said):
        rm.separate_reasoning(expression, model_type=model_type)


def test_a_struct_of_thinking_is_taken_as_it_is():
    step = rm.gen("x", thinking=Thinking(max_tokens=3))  # type: ignore[arg-type]
    assert step.node.thinking == Thinking(max_tokens=3)  # type: ignore[attr-defined]


# --- backends with a model ---


@rm.function
def twice(s):
    s += rm.user("?") + rm.assistant(rm.gen("x", 8, thinking={"max_tokens": 7}, regex="[0-9]{3}"))
    s += rm.user("!") + rm.assistant(rm.gen("y", 5, thinking={"max_tokens": 0}) + rm.gen("z", 2))


def test_the_runtime_keeps_the_budget(engine, endpoint):
    """The model is random: it never ends its thoughts by itself. Its tokens are bytes."""
    found = []
    options = {"temperature": 0.0, "ignore_eos": False}
    for backend, compiled in ((engine, False), (endpoint, False), (engine, True), (endpoint, True)):
        state = twice.run(backend=backend, compiled=compiled, **options)
        assert state.error() is None
        assert re.fullmatch("[0-9]{3}", state["x"])
        usages = [state.get_meta_info(name) for name in "xyz"]
        marks = len("</think>\n\n")
        assert [usage["reasoning_tokens"] for usage in usages] == [7 + marks, marks, 0]
        assert usages[1]["completion_tokens"] <= marks + 5
        assert state.thinking("y") == ""
        prompts = [state.prompt_of(name) for name in "xyz"]
        assert prompts[0].endswith("<think>\n")
        assert f"{state['x']}" in prompts[1]
        assert prompts[1].count("<think>") == prompts[2].count("<think>") == 1
        found.append([state["x"], state["y"], state["z"], state.thinking("x"), prompts])
    assert found == found[:1] * 4


@pytest.mark.parametrize("field", [None, "reasoning"])
def test_the_stop_of_an_openai_endpoint_is_the_answers(endpoint, field):
    """The thoughts are all "=", a stop string. The model's tokens are bytes, "!" is the first."""

    @rm.function
    def ask(s):
        step = rm.gen("x", 20, thinking={"max_tokens": 7}, schema=int, stop=[" ", "="])
        s += rm.user("?") + rm.assistant(step)

    backend = rm.OpenAI("default", base_url=f"{endpoint.base_url}/v1", thinking=field)
    state = ask.run(backend=backend, temperature=0.0, logit_bias={ord("=") - ord("!"): 100.0})
    assert state.error() is None
    assert (type(state["x"]), state.thinking("x")) == (int, "=" * 7)
    # Exact where the border lies between two steps; one step may write the end and the answer.
    assert state.get_meta_info("x")["reasoning_tokens"] >= 7 + len("</think>")
    backend.close()


def test_streams_of_a_model_come_apart(engine, endpoint):
    for backend in (engine, endpoint):
        state = twice.run(backend=backend, stream=True, temperature=0.0)
        assert "".join(state.text_iter("x", thinking=True)) == state.thinking("x")
        assert "".join(state.text_iter("x")) == state["x"]


# --- endpoints that take messages ---


@pytest.fixture
def served():
    with LiveServer(ScriptedFrontend(["Two and\ntwo.</think>4", "6"])) as server:
        yield server


def test_an_endpoint_with_our_own_fields(served):
    chat = program_of(
        rm.user("2 + 2?") + rm.assistant(rm.gen("x", 9, thinking={"max_tokens": 20}, stop="7")),
        rm.user("3 + 3?") + rm.assistant(rm.gen("y", thinking=False)),
    )
    backend = rm.OpenAI(served.frontend.info.name, base_url=served.url + "/v1", api_key="k")
    state = chat.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x", thinking=True)) == state.thinking("x") == "Two and\ntwo."
    assert (state["x"], state["y"], state.thinking("y")) == ("4", "6", "")
    first, second = served.frontend.requests
    assert first.preambles == (
        Preamble(start="<think>", end="</think>", max_tokens=20, apart=True, counted=True),
    )
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (29, 128)
    assert second.preambles == ()
    assert [(turn.role, turn.content, turn.reasoning) for turn in second.chat] == [
        ("user", "2 + 2?", ""),
        ("assistant", "4", "Two and\ntwo."),
        ("user", "3 + 3?", ""),
    ]
    backend.close()


@pytest.mark.parametrize(
    ("fields", "thinking", "sent"),
    [
        ("effort", True, {"reasoning_effort": "medium", "max_tokens": 1152}),
        ("effort", {"effort": "low"}, {"reasoning_effort": "low", "max_tokens": 1152}),
        ("effort", False, {"reasoning_effort": "none", "max_tokens": 128}),
        ("reasoning", True, {"reasoning": {"enabled": True, "max_tokens": 1024}, "max_tokens": 1152}),
        (
            "reasoning",
            {"max_tokens": 5},
            {"reasoning": {"enabled": True, "max_tokens": 5}, "max_tokens": 133},
        ),
        ("reasoning", {"effort": "high"}, {"reasoning": {"enabled": True, "effort": "high"}}),
        ("reasoning", False, {"reasoning": {"enabled": False}, "max_tokens": 128}),
        ("template", True, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        ("template", False, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ],
)
def test_what_an_endpoint_is_sent(fields, thinking, sent):
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", thinking=thinking)))
    field = "reasoning" if fields == "reasoning" else "reasoning_content"
    deltas = [{field: "Hm, "}, {field: "yes."}, {"content": "Four."}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    details = {"reasoning_tokens": 7}
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": details}
    chunks.append({"choices": [], "usage": usage})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    with RawServer(lambda target: answer(events.encode(), kind="text/event-stream")) as raw:
        backend = rm.OpenAI("m", base_url=raw.url + "/v1", api_key="k", thinking=fields)
        state = ask.run(backend=backend)
        assert (state["x"], state.thinking("x")) == ("Four.", "Hm, yes.")
        assert state.usage.reasoning_tokens == 7
        (body,) = raw.bodies
        assert {name: body.get(name) for name in sent} == sent
        backend.close()


@pytest.mark.parametrize(
    ("options", "thinking", "field"),
    [
        ({"thinking": "effort"}, {"max_tokens": 5}, "thinking.max_tokens"),
        ({"thinking": "template"}, {"max_tokens": 5}, "thinking.max_tokens"),
        ({"thinking": "template"}, {"effort": "low"}, "thinking.effort"),
        ({"is_chat_model": False}, True, "thinking"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_by_name(options, thinking, field):
    ask = program_of(
        rm.gen("x", thinking=thinking) if options.get("is_chat_model") is False else rm.user("?"),
        rm.assistant(rm.gen("x", thinking=thinking)),
    )
    error = ask.run(backend=rm.OpenAI("m", base_url="http://127.0.0.1:9/v1", **options)).error()
    assert isinstance(error, UnsupportedNode)
    assert error.field == field


@pytest.mark.parametrize("after", range(16))
def test_a_lost_connection_repeats_no_thoughts(after, clock):
    ask = program_of(rm.user("?") + rm.assistant(rm.gen("x", thinking=True, temperature=0)))
    backend = Breaking([SAID[0]] * 2, Overloaded("lost"), after, once=True)
    backend.retry = Retry(1)
    state = ask.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x", thinking=True)) == state.thinking("x") == "Two and\ntwo."
    assert "".join(state.text_iter("x")) == state["x"] == "Four it is."
    assert len(backend.requests) == 2
