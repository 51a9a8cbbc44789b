"""Programs whose steps run on several models."""

from __future__ import annotations

import asyncio
import functools
import json

import msgspec
import pytest

import ramify as rm
from ramify.errors import UnsupportedNode
from ramify.model_info import ChatFormat, ToolPieces
from tests.lang.steps import add, program_of

ROLES = ("system", "user", "assistant")
PLAIN = ChatFormat(
    prefix={f"{before}>{role}": f"[{role}] " for before in ("", *ROLES) for role in ROLES},
    suffix={"system": "\n", "user": "\n", "assistant": "[end]\n"},
    exact=True,
)
NATIVE = ChatFormat(
    prefix=PLAIN.prefix
    | {"assistant>tool": "[tool] ", "tool>tool": "[tool] ", "tool>assistant": "[assistant] "},
    suffix=PLAIN.suffix | {"tool": "\n"},
    exact=True,
    tool_format="llama3",
    tools=ToolPieces(
        start="[system] ",
        place="user",
        before="TOOLS ",
        between="",
        after=" END\n",
        indent=None,
        quoted=False,
    ),
)
"""A template that writes tools at the beginning of the user turn, calls as Llama does."""


class Messages(rm.ScriptedBackend):
    """A model behind an API that takes messages only and returns no token ids."""

    takes_messages = True

    async def generate(self, request):
        self.chats = [*getattr(self, "chats", []), request.chat]
        text = "".join(f"{turn.role}: {turn.content}\n" for turn in request.chat)
        plain = msgspec.structs.replace(request, chat=None, prompt=(text,))
        async for chunk in super().generate(plain):
            yield msgspec.structs.replace(chunk, ids=(), kept_ids=0, tail="")


def small_and_big(small, big, **options):
    return (
        rm.ScriptedBackend(small, name="Small-1B"),
        rm.ScriptedBackend(big, name="Big-70B", **{"chat_format": PLAIN, **options}),
    )


def prompts(backend):
    return [backend.prompt_text(request) for request in backend.requests]


def ids_in(request):
    return [segment for segment in request.prompt if not isinstance(segment, str)]


# --- what a model is shown ----------------------------------------------------------------------


@rm.function
def debate(s, big):
    s += rm.system("Be brief.") + rm.user("Cats or dogs?")
    s += rm.assistant("I say: " + rm.gen("first") + rm.gen("second", backend=big) + rm.gen("third"))
    s += rm.user("Sure?") + rm.assistant(rm.gen("fourth", backend=big))
    s += rm.user("Really?") + rm.assistant(rm.gen("fifth"))


ANSWERS = {
    "first": "cats",
    "second": " and dogs",
    "third": " and birds",
    "fourth": "Yes, sure.",
    "fifth": "No.",
}


def test_each_model_reads_the_conversation_in_its_own_template():
    small, big = small_and_big(ANSWERS, ANSWERS)
    state = debate.run(big, backend=small)
    assert [state[name] for name in ANSWERS] == list(ANSWERS.values())
    assert prompts(big) == [
        "[system] Be brief.\n[user] Cats or dogs?\n[assistant] I say: cats",
        "[system] Be brief.\n[user] Cats or dogs?\n[assistant] I say: cats and dogs and birds[end]\n"
        "[user] Sure?\n[assistant] ",
    ]
    assert prompts(small)[-1] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCats or dogs?<|im_end|>\n"
        "<|im_start|>assistant\nI say: cats and dogs and birds<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\nYes, sure.<|im_end|>\n<|im_start|>user\nReally?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert state.text() == prompts(small)[-1] + "No.<|im_end|>\n"
    assert state.messages()[2] == {"role": "assistant", "content": "I say: cats and dogs and birds"}
    assert state.prompt_of("fourth") == prompts(big)[1]


def test_a_model_gets_its_own_token_ids_and_the_text_of_others():
    small, big = small_and_big(ANSWERS, ANSWERS)
    debate.run(big, backend=small)
    generated = {name: tuple(small.encode([ANSWERS[name]])) for name in ("first", "third")}
    assert ids_in(small.requests[-1]) == [generated["first"], generated["third"]]
    assert ids_in(big.requests[-1]) == [tuple(big.encode([" and dogs"]))]


def test_the_prefix_of_each_model_stays_in_its_cache():
    small, big = small_and_big(ANSWERS, ANSWERS)
    state = debate.run(big, backend=small)
    fourth = next(call for call in state.trace.walk() if call.name == "fourth")
    before = big.encode(["[system] Be brief.\n[user] Cats or dogs?\n[assistant] I say: cats and dogs"])
    assert fourth.own_usage.cached_tokens >= len(before)


def test_branches_of_a_fork_on_another_model_share_its_prefix():
    @rm.function
    def program(s, big):
        s += rm.user("Q") + rm.assistant(rm.gen("x", backend=big))
        forks = s.fork(2)
        for number, fork in enumerate(forks):
            fork += rm.user(f"Branch {number}.") + rm.assistant(rm.gen("y", backend=big))
        forks.join()
        s += rm.user("Last.") + rm.assistant(rm.gen("z", backend=big))

    small, big = small_and_big({}, {"x": "a", "y": "b", "z": "c"})
    state = program.run(big, backend=small)
    assert state["y"] == ["b", "b"]
    assert small.requests == []
    assert "[user] Q\n[assistant] a[end]\n[user] Last.\n[assistant] " in prompts(big)
    assert all(ids_in(request) == [tuple(big.encode(["a"]))] for request in big.requests[1:])


def test_the_text_of_joined_branches_is_read_by_every_model():
    @rm.function
    def program(s, big):
        s += "List:"
        forks = s.fork(2)
        forks += rm.gen("x", backend=big) + rm.gen("y")
        forks.join("concate_and_append")
        s += rm.gen("z", backend=big)

    small, big = small_and_big({"y": " small."}, {"x": " big", "z": " end"}, chat_format=None)
    state = program.run(big, backend=small)
    assert state.text() == "List: big small. big small. end"
    assert prompts(big)[-1] == "List: big small. big small."
    assert ids_in(big.requests[-1]) == [tuple(big.encode([" big"]))] * 2


def test_a_select_on_another_model():
    @rm.function
    def program(s, big):
        s += rm.user("Q") + rm.assistant(rm.gen("x", choices=["yes", "no"], backend=big) + rm.gen("y"))
        s += rm.user("R") + rm.assistant(rm.select("z", ["one", "two"], backend=big))

    small, big = small_and_big({"y": ", as I said."}, {"x": "no", "z": "two"})
    state = program.run(big, backend=small)
    assert (state["x"], state["z"]) == ("no", "two")
    assert prompts(small) == ["<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nno"]
    assert ids_in(small.requests[0]) == []


def test_retries_on_another_model_are_shown_in_its_template():
    @rm.function
    def program(s, big, keep):
        s += rm.user("Q") + rm.assistant(
            "A: " + rm.gen("x", regex=".*", validate=odd, retries=1, keep_failed=keep, backend=big)
        )
        s += rm.user("R") + rm.assistant(rm.gen("y"))

    def odd(value):
        if int(value) % 2 == 0:
            raise ValueError("It is even")

    for keep in (False, True):
        small, big = small_and_big({"y": "b"}, {"x": ["2", "3"]})
        state = program.run(big, keep, backend=small)
        assert state["x"] == "3"
        assert prompts(big)[1] == (
            "[user] Q\n[assistant] A: 2[end]\n[user] That is not valid. It is even.\n"
            "Give the whole answer again, corrected.\n[assistant] A: "
        )
        assert ("It is even" in prompts(small)[0]) == keep
        assert "\nA: 3<|im_end|>\n<|im_start|>user\nR" in prompts(small)[0]


def test_several_outputs_of_another_model():
    @rm.function
    def program(s, big):
        s += rm.user("Q") + rm.assistant(rm.gen("x", n=2, backend=big) + rm.gen("y"))

    small, big = small_and_big({"y": "!"}, {"x": ["a", "b"]})
    state = program.run(big, backend=small)
    assert state["x"] == ["a", "b"]
    assert prompts(small)[0].endswith("assistant\na")


# --- backends that take messages ----------------------------------------------------------------


def test_a_step_on_an_endpoint_that_takes_messages():
    small, big = rm.ScriptedBackend(ANSWERS), Messages({"x": "Yes."}, name="remote")

    program = program_of(
        rm.system("S") + rm.user("Q") + rm.assistant("A: " + rm.gen("first")),
        rm.user("Sure?") + rm.assistant(rm.gen("x", backend=big)),
        rm.user("R") + rm.assistant(rm.gen("third")),
    )
    state = program.run(backend=small)
    assert [(turn.role, turn.content) for turn in big.chats[0]] == [
        ("system", "S"),
        ("user", "Q"),
        ("assistant", "A: cats"),
        ("user", "Sure?"),
    ]
    assert "assistant\nYes.<|im_end|>" in prompts(small)[-1]
    assert state.text().endswith(" and birds<|im_end|>\n")
    with pytest.raises(rm.ProgramError, match="remote takes whole messages only") as failed:
        debate.run(big, backend=small)["second"]
    assert isinstance(failed.value, UnsupportedNode)
    assert failed.value.line.startswith(__file__)


def test_a_local_step_of_a_program_on_an_endpoint_that_takes_messages():
    small, remote = rm.ScriptedBackend(ANSWERS, chat_format=PLAIN), Messages({"x": "Yes.", "y": "No."})

    program = program_of(
        rm.user("Q") + rm.assistant(rm.gen("x")),
        rm.user("R") + rm.assistant("B: " + rm.gen("first", backend=small) + rm.gen("second", backend=small)),
        rm.user("T") + rm.assistant(rm.gen("y")),
    )
    state = program.run(backend=remote)
    assert state["y"] == "No."
    assert prompts(small)[1] == "[user] Q\n[assistant] Yes.[end]\n[user] R\n[assistant] B: cats"
    assert remote.chats[1][3].content == "B: cats and dogs"


def test_plain_text_is_refused_by_name():
    @rm.function
    def program(s, big):
        s += "Q: " + rm.gen("first") + rm.gen("x", backend=big)

    state = program.run(Messages({}, name="remote"), backend=rm.ScriptedBackend(ANSWERS))
    assert state["first"] == "cats"
    with pytest.raises(
        rm.ProgramError, match=r"remote takes whole messages only, and this text is in none: 'Q: '"
    ):
        state["x"]


def test_a_chat_is_refused_by_a_model_without_a_template():
    base = rm.ScriptedBackend({}, chat_format=None, name="base")
    with pytest.raises(rm.ProgramError, match="base has no chat template"):
        debate.run(base, backend=rm.ScriptedBackend(ANSWERS))["second"]


# --- tools --------------------------------------------------------------------------------------


@rm.function
def agent(s, first=None, second=None):
    s += rm.system("You help.", tools=[add]) + rm.user("2 + 3?")
    s.call_tools([add], "calls", backend=first)
    s += rm.assistant(rm.gen("answer", backend=second))


CALL = json.dumps({"name": "add", "arguments": {"a": 2, "b": 3}})
GENERIC = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA = CALL.replace("arguments", "parameters")


def test_calls_of_another_model_are_written_in_each_models_form():
    for first in (False, True):
        calls = {"calls": LLAMA.removeprefix('{"name": "') if first else GENERIC.removeprefix("<tool_call>")}
        generic, native = small_and_big(
            {**calls, "answer": "5."}, {**calls, "answer": "5."}, chat_format=NATIVE
        )
        state = agent.run(first=native if first else None, second=None if first else native, backend=generic)
        assert [call.result for call in state["calls"]] == [5]
        result = "<tool_response>\n5\n</tool_response>"
        shown = f"<|im_start|>assistant\n{GENERIC}<|im_end|>\n<|im_start|>user\n{result}"
        assert shown in state.text()
        assert "You can call functions." in state.text()
        read = prompts(native)[0]
        assert read.startswith("[system] You help.\n[user] TOOLS {")
        assert " END\n2 + 3?\n" in read
        if first:
            assert read.endswith('[assistant] {"name": "')
            assert shown in prompts(generic)[0]
            assert ids_in(generic.requests[0]) == []
        else:
            assert read.endswith(f"2 + 3?\n[assistant] {LLAMA}[end]\n[tool] 5\n[assistant] ")


def test_a_model_is_sent_its_own_calls_as_token_ids():
    @rm.function
    def program(s, big):
        s += rm.system("S", tools=[add]) + rm.user("Q")
        s.call_tools([add], "calls", backend=big)
        s += rm.assistant(rm.gen("x", backend=big))

    output = LLAMA.removeprefix('{"name": "')
    small, big = small_and_big({}, {"calls": output, "x": "5"}, chat_format=NATIVE)
    program.run(big, backend=small)
    assert ids_in(big.requests[1]) == [tuple(big.encode([output]))]


def test_calls_by_an_endpoint_that_takes_messages():
    remote = Messages({"calls": json.dumps({"calls": [json.loads(CALL)]}), "answer": "5."}, name="remote")
    state = agent.run(first=remote, backend=rm.ScriptedBackend({"answer": "5."}))
    assert GENERIC in state.text()
    reverse = agent.run(
        second=remote, backend=rm.ScriptedBackend({"calls": GENERIC.removeprefix("<tool_call>")})
    )
    assert reverse["answer"] == "5."
    assert remote.chats[-1][2].content == json.dumps({"calls": [json.loads(CALL)]})


def test_the_backend_that_made_the_calls_is_told_which_tools_run():
    class Told(rm.ScriptedBackend):
        told = ()

        async def await_tools(self, program, branch, tools):
            self.told = (*self.told, (program, branch, tools))

    called = f"{GENERIC}\n{GENERIC}".removeprefix("<tool_call>")
    own, other = Told({"answer": "5."}), Told({"calls": called})
    agent.run(first=other, backend=own)
    hint = other.requests[0].hint
    assert (own.told, other.told) == ((), ((hint.program, hint.branch, ("add",)),))


# --- the runtime is told ------------------------------------------------------------------------


def test_each_backend_hears_of_the_program_and_of_its_end():
    small, big = small_and_big(ANSWERS, ANSWERS)
    debate.run(big, backend=small)
    programs = {request.hint.program for backend in (small, big) for request in backend.requests}
    assert [*programs] == small.ended == big.ended
    unused = rm.ScriptedBackend({})
    debate.run(rm.Router({"a": small, "b": unused}).backends["a"], backend=small)
    assert unused.ended == []


def test_hints_are_about_the_backend_that_gets_them():
    @rm.function
    def program(s, big):
        s += "Q" + rm.gen("first", backend=big) + rm.gen("second") + rm.gen("third")
        forks = s.fork(2)
        forks.join()
        s += rm.gen("fourth", backend=big)

    small, big = small_and_big(ANSWERS, ANSWERS)
    program.run(big, backend=small)
    (first, fourth), (second, third) = ([request.hint for request in one.requests] for one in (big, small))
    assert (first.next_use, fourth.next_use) == ("soon", "never")
    assert (second.next_use, third.next_use) == ("soon", "unknown")
    assert fourth.calls_left == 0
    assert fourth.ended == ("b2", "b3", "f1")
    told = [hint.calls_left for hint in (second, third) if hint.calls_left is not None]
    assert all(left <= 1 for left in told)


# --- names --------------------------------------------------------------------------------------


def router(**answers):
    small, big = small_and_big({**ANSWERS, **answers}, {**ANSWERS, **answers})
    return rm.Router({"small": small, "big": big}, default="small")


def test_a_router_gives_names_to_backends():
    backends = router()
    state = debate.run("big", backend=backends)
    assert state["fourth"] == "Yes, sure."
    assert len(backends.backends["big"].requests) == 2
    assert len(backends.backends["small"].requests) == 3
    same = debate.run(backends.backends["big"], backend=backends)
    assert same.usage_by_model.keys() == {"small", "big"}


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(rm.InvalidRequest, match=r"no backend 'bgi'.*Did you mean big\?") as unknown:
        debate.run("bgi", backend=router())
    assert unknown.value.field == "backend"
    with pytest.raises(rm.InvalidRequest, match="It has small, big"):
        debate.run("zzz", backend=router())
    with pytest.raises(rm.InvalidRequest, match="no Router that gives names"):
        debate.run("big", backend=rm.ScriptedBackend(ANSWERS))
    with pytest.raises(rm.InvalidRequest, match="is not a backend"):
        debate.run(3, backend=rm.ScriptedBackend(ANSWERS))


def test_wrong_routers():
    with pytest.raises(rm.InvalidRequest, match="at least one"):
        rm.Router({})
    with pytest.raises(rm.InvalidRequest, match="no backend 'b'"):
        rm.Router({"a": rm.ScriptedBackend([])}, default="b")
    for wrong in (None, "name", router()):
        with pytest.raises(rm.InvalidRequest, match="cannot hold") as refused:
            rm.Router({"a": wrong})
        assert refused.value.field == "backends.a"


def test_a_router_is_its_default_backend():
    backends = router()
    rm.set_default_backend(backends)
    try:
        assert debate.run("big").ret_value is None
        assert debate.run("big", backend="big").usage_by_model.keys() == {"big"}
        assert rm.flush_cache()
    finally:
        rm.set_default_backend(None)
    assert asyncio.run(backends.info()).name == "Small-1B"
    assert backends.requests is backends.backends["small"].requests
    assert not hasattr(backends, "nothing")


def test_closing_a_router_closes_all():
    closed = []

    class Closing(rm.ScriptedBackend):
        async def aclose(self):
            closed.append(self)
            if len(closed) == 1:
                raise RuntimeError("first")

    one, two = Closing([]), Closing([])
    with pytest.raises(RuntimeError, match="first"), rm.Router({"one": one, "two": two}):
        pass
    assert closed == [one, two]


def test_recordings_of_several_models(tmp_path):
    backends = router().backends
    recorded = {name: rm.RecordingBackend(one, tmp_path / name) for name, one in backends.items()}
    before = debate.run("big", backend=rm.Router(recorded))
    replayed = {name: rm.ReplayBackend(tmp_path / name) for name in backends}
    assert debate.run("big", backend=rm.Router(replayed)).text() == before.text()
    assert all(not one.unused for one in replayed.values())


# --- what it cost -------------------------------------------------------------------------------


def test_usage_by_model():
    state = debate.run("big", backend=router())
    usage = state.usage_by_model
    assert list(usage) == ["small", "big"]
    assert usage["small"].completion_tokens + usage["big"].completion_tokens == state.usage.completion_tokens
    assert usage["big"].prompt_tokens == sum(
        call.own_usage.prompt_tokens for call in state.trace.walk() if call.name in ("second", "fourth")
    )
    lines = str(state.trace).splitlines()
    assert [line.split("  ")[0] for line in lines if " big" in line] == ["├─ gen second", "├─ gen fourth"]
    data = state.trace.to_dict()
    assert data["usage_by_model"]["big"]["completion_tokens"] == usage["big"].completion_tokens
    assert [child["model"] for child in data["children"]] == ["small", "big", "small", "big", "small"]
    alone = debate.run(None, backend=rm.ScriptedBackend(ANSWERS, name="only"))
    assert alone.usage_by_model == {"only": alone.usage}
    assert "only" not in str(alone.trace)


# --- compiled -----------------------------------------------------------------------------------


@rm.function
def named(s, topic="cats"):
    s += rm.user("About " + topic) + rm.assistant(rm.gen("first", backend="big"))
    s += rm.user("And?") + rm.assistant(rm.gen("second") + rm.select("pick", ["a", "b"], backend="big"))


def test_a_compiled_program_runs_each_step_on_its_model():
    compiled = named.compile()
    backends = router(pick="b")
    for program in (compiled, named.with_options(compiled=True)):
        state = (
            program.run(topic="dogs", backend=backends) if program is named else program.run(backend=backends)
        )
        assert list(state.usage_by_model) == ["big", "small"]
    assert "gen first on 'big'" in str(compiled.graph())
    with pytest.raises(UnsupportedNode, match="Node 4, gen first on 'big', has backend='big'") as refused:
        _ = compiled.graph().graph
    assert refused.value.field == "backend"
    with pytest.raises(rm.InvalidRequest, match="no Router"):
        compiled.run(backend=rm.ScriptedBackend(ANSWERS))


class Submits(rm.ScriptedBackend):
    """A backend that offers to run whole graphs."""

    def submit_program(self, submission, failed):
        raise AssertionError("a graph of several models was submitted to one")


@pytest.mark.parametrize("way", ["compile", "compiled", "prefix"])
def test_a_graph_of_several_models_is_not_submitted_to_one_server(way):
    @rm.function
    def branching(s):
        s += rm.user("Q") + rm.assistant(rm.gen("first", backend="big"))
        if s["first"] == "cats":
            s += rm.user("R") + rm.assistant(rm.gen("second"))

    backends = rm.Router({"small": Submits(ANSWERS), "big": rm.ScriptedBackend({**ANSWERS, "pick": "a"})})
    if way == "prefix":
        state = branching.run(backend=backends, compiled=True)
    else:
        state = (named.compile() if way == "compile" else named).run(
            backend=backends, compiled=way == "compiled"
        )
    assert state["second"] == " and dogs"
    assert list(state.usage_by_model) == ["big", "small"]


# --- programs in programs -----------------------------------------------------------------------


@rm.function
def ask(s, question):
    s += rm.user(question) + rm.assistant(rm.gen("first"))
    forks = s.fork(2)
    forks += rm.user("Why?") + rm.assistant(rm.gen("second"))
    forks.join()
    return s["first"], s["second"]


def test_a_program_on_the_state_of_another_may_have_its_own_backend():
    @rm.function
    def program(s, sub):
        found = sub(s, question="Q", backend="big") if sub is ask else sub(s, question="Q")
        s += rm.user("T") + rm.assistant(rm.gen("third"))
        return found

    for sub in (ask, ask.with_options(backend="big")):
        backends = router()
        state = program.run(sub, backend=backends)
        assert state.ret_value == ("cats", [" and dogs"] * 2)
        assert len(backends.backends["big"].requests) == 3
        assert prompts(backends.backends["small"])[0].count("<|im_start|>") == 4
    with pytest.raises(rm.UnsupportedField, match="temperature has no effect"):
        program.run(ask.with_options(temperature=0.5), backend=router())


def test_a_program_that_another_one_runs_is_in_its_trace():
    @rm.function
    def program(s):
        s += rm.user("T") + rm.assistant(rm.gen("third"))
        s["third"]
        inner = ask.run(question="Q", backend="big")
        s += rm.user("U") + rm.assistant(rm.gen("fourth"))
        return inner

    backends = router()
    state = program.run(backend=backends)
    inner = state.ret_value
    assert [call.name for call in state.trace.children] == ["third", "ask", "fourth"]
    assert state.trace.children[1] is inner.trace
    assert inner.trace.start_s >= state.trace.children[0].end_s
    assert state.usage_by_model["big"] == inner.usage
    assert (
        state.usage_by_model["small"].completion_tokens
        == state.usage.completion_tokens - inner.usage.completion_tokens
    )
    assert "├─ ask" in str(state.trace)
    hints = [request.hint for request in backends.backends["big"].requests]
    assert {hint.program for hint in hints}.isdisjoint({backends.backends["small"].requests[0].hint.program})
    assert hints[0].path == ("gen first",)
    alone = ask.run(question="Q", backend=backends)
    assert alone.trace.parent is None


def test_rows_of_a_batch_in_a_program_are_in_its_trace(tmp_path):
    @rm.function
    def program(s, **options):
        ask.run_batch([{"question": "a"}, {"question": "b"}], backend="big", **options)

    backends = router()
    state = program.run(backend=backends)
    assert [call.name for call in state.trace.children] == ["ask", "ask"]
    assert list(state.usage_by_model) == ["big"]
    written = program.run(out=tmp_path / "rows.jsonl", backend=backends)
    assert written.trace.children == []


async def test_programs_that_an_async_program_runs_are_in_its_trace():
    @rm.function
    async def inner(s, question):
        s += rm.user(question) + rm.assistant(rm.gen("first"))

    @rm.function
    async def program(s):
        await asyncio.gather(*(inner.run(question=q, backend="big") for q in "ab"))
        await inner.run_batch([{"question": "c"}], backend="small")

    state = await program.run(backend=router())
    assert [call.children[0].model for call in state.trace.children] == ["big", "big", "small"]
    assert (await inner.run(question="d", backend=router())).trace.parent is None


def test_a_program_that_a_tool_runs_is_below_the_tool():
    def research(topic: str) -> str:
        """Find out."""
        return ask.run(question=topic, backend="big").ret_value[0]

    @rm.function
    def program(s):
        s += rm.user("Go.", tools=[research])
        s.call_tools([research], "calls")

    written = json.dumps({"name": "research", "arguments": {"topic": "x"}})
    state = program.run(backend=router(calls=f"\n{written}\n</tool_call>"))
    assert state["calls"][0].result == "cats"
    tool = state.trace.children[1]
    assert (tool.kind, tool.children[0].name) == ("tool", "ask")
    assert set(state.usage_by_model) == {"small", "big"}


def test_a_compiled_program_in_a_program_finds_the_answers_of_its_server():
    @rm.function
    def program(s):
        s += "Q" + rm.gen("first")
        s["first"]
        return ask.compile().run(question="Q", backend="big")

    inner = program.run(backend=router()).ret_value
    alone = ask.compile().run(question="Q", backend=router())
    places = [[call.place for call in state.trace.walk()] for state in (inner, alone)]
    assert places[0] == places[1]


def test_misses_are_explained_by_requests_to_the_same_model():
    state = debate.run("big", backend=router())
    found = {child["name"]: child["miss"] for child in state.trace.to_dict()["children"]}
    assert found["second"]["reason"] == "first"
    assert (found["third"]["reason"], found["third"]["nearest"]) == ("extends", "first")
    assert (found["fourth"]["reason"], found["fourth"]["nearest"]) == ("extends", "second")


@rm.function
def judged(s: rm.ProgramState) -> str:
    s += rm.user("Write.") + rm.assistant(rm.gen("draft"))
    s += rm.user("Judge it.") + rm.assistant(rm.select("verdict", ["good", "bad"], model="big"))
    s += rm.decide("sure", bool, "Sure?", model="big")
    return s["verdict"]


SAID = {"draft": "Trams.", "verdict": "good", "sure": True}


@pytest.mark.parametrize("program", [judged, judged.compile()], ids=["body", "graph"])
def test_a_step_names_a_model_of_the_backend(program, tmp_path):
    backend = rm.ScriptedBackend(SAID, name="small")
    recorder = rm.RecordingBackend(backend, tmp_path / "run.jsonl")
    router = rm.Router({"small": rm.ScriptedBackend(SAID), "big": rm.ScriptedBackend(SAID)})
    replay = functools.partial(rm.ReplayBackend, tmp_path / "run.jsonl")
    for make in (lambda: backend, lambda: recorder, replay, lambda: router):
        state = program.run(backend=make())
        assert state.ret_value == "good"
        assert state["sure"].value is True
        assert list(state.usage_by_model) == ["small", "big"]
        assert "select verdict  big" in str(state.trace)
        assert "gen draft  small" in str(state.trace)


def test_a_recording_keeps_the_models_apart(tmp_path):
    @rm.function
    def asked(s, which):
        s += "Q" + rm.gen("x", model=which)

    path = tmp_path / "run.jsonl"
    recorder = rm.RecordingBackend(rm.ScriptedBackend({"x": ["of small", "of big"]}, name="small"), path)
    for name in ("small", "big"):
        asked.run(name, backend=recorder)
    replay = rm.ReplayBackend(path)
    assert asked.run("big", backend=replay)["x"] == "of big"
    assert asked.run("small", backend=replay)["x"] == "of small"
    assert not replay.unused
    for name, said in (("big", "more often"), ("huge", "no model 'huge'")):
        with pytest.raises(rm.NotRecorded, match=said):
            asked.run(name, backend=replay)


def test_the_model_of_a_run_and_of_a_part_of_it():
    part = program_of(rm.gen("part"))

    @rm.function
    def whole(s):
        s += "a" + rm.gen("x")
        part(s, model="big")
        s += rm.gen("y", model="small")

    backend = rm.ScriptedBackend({"x": "1", "part": "2", "y": "3"}, name="small")
    assert list(whole.run(backend=backend).usage_by_model) == ["small", "big"]
    assert [node.model for node in whole.compile().graph().graph.nodes if hasattr(node, "model")] == [
        None,
        "big",
        "small",
    ]
    state = whole.run(backend=backend, model="huge")
    assert list(state.usage_by_model) == ["huge", "big", "small"]
    router = rm.Router({"a": backend, "b": rm.ScriptedBackend({"part": "4"}, name="b")})
    assert list(part.run(backend=router, model="other").usage_by_model) == ["other"]
    (row,) = part.run_batch([{}], backend=router, model="b")
    assert list(row.usage_by_model) == ["b"]


def test_a_model_on_a_backend_of_one_is_refused():
    class One(rm.ScriptedBackend):
        model = property(lambda self: (_ for _ in ()).throw(AttributeError))

    with pytest.raises(UnsupportedNode, match="One has one model"):
        judged.run(backend=One(SAID))
    with pytest.raises(rm.ProgramError, match="One has one model"):
        program_of(rm.gen("x", model="big")).run(backend=One(SAID)).error()
    with pytest.raises(rm.InvalidRequest, match="Did you mean big"):
        judged.run(backend=rm.Router({"big": One(SAID)}), model="bigg")
    for model in (1, ["big"]):
        with pytest.raises(rm.InvalidRequest, match="model"):
            rm.gen("x", model=model)
    openai = rm.OpenAI("small", base_url="http://127.0.0.1:9/v1")
    assert openai.model("big").model_name == "big"
    assert openai.model("big").model("small") is openai
