"""Tools: their schemas, the turns of calls and results, and failures."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import threading
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

import ramify as rm
from ramify.errors import InvalidRequest, RequestTimeout
from ramify.lang.common.event import Event
from ramify.lang.tools.forms import JsonCalls
from ramify.lang.tools.tool import read_docstring
from ramify.lang.trace.report import report_data
from ramify.messages import Generate


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Place(pydantic.BaseModel):
    city: str
    country: str = "NL"


@rm.tool
def weather(place: Place, unit: Unit = Unit.CELSIUS) -> str:
    """Tell the weather of today.

    It is always fine.

    Args:
        place: Where; a city
            and its country.
        unit: Of the temperature.

    Returns:
        A sentence.
    """
    assert isinstance(place, Place)
    return f"20 {unit.value} in {place.city}"


@rm.tool(name="sum", timeout=5)
async def add(a: int, b: Annotated[int, pydantic.Field(ge=0)]) -> int:
    """Add two numbers.

    :param a: The first.
    :param int b: The second.
    """
    await asyncio.sleep(0)
    return a + b


def divide(a: float, b: float) -> float:
    return a / b


TOOLS = [weather, add, divide]


def written(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def after_trigger(*calls: str) -> str:
    """The output of a model after the trigger of the first call, which the program has appended."""
    return "\n".join(calls).removeprefix("<tool_call>")


@rm.function
def ask(s, max_calls=4, errors="show", **options):
    s += rm.system("You help.", tools=TOOLS) + rm.user("What now?")
    s.call_tools(TOOLS, "calls", max_calls=max_calls, errors=errors, **options)
    s += rm.assistant(rm.gen("answer"))


def called(tool: Any, *calls: str) -> list[rm.ToolCall]:
    """The calls of `tool` in a program of one turn."""

    @rm.function
    def program(s):
        s += rm.user("Go.", tools=[tool])
        return list(s.call_tools([tool]))

    return program.run(backend=rm.ScriptedBackend([after_trigger(*calls)])).ret_value


# --- schemas ------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_signature():
    assert add.name == "sum"
    assert add.description == "Add two numbers."
    assert add.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "minimum": 0, "description": "The second."},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert weather.description == "Tell the weather of today.\n\nIt is always fine."
    assert list(weather.parameters["properties"]) == ["place", "unit"]
    assert weather.parameters["required"] == ["place"]
    jsonschema.Draft202012Validator.check_schema(weather.parameters)
    described = json.loads(add.described.parameters)
    assert described == add.parameters


def test_arguments_are_read_as_their_types():
    assert weather.read('{"place": {"city": "Delft"}, "unit": "F"}') == {
        "place": Place(city="Delft"),
        "unit": Unit.FAHRENHEIT,
    }
    for wrong in ('{"place": 3}', "{}", '{"place": {"city": "a"}, "more": 1}', "[1]", "x"):
        with pytest.raises(ValueError):
            weather.read(wrong)


def test_a_tool_is_still_its_function():
    assert weather(Place(city="Delft")) == "20 C in Delft"
    assert asyncio.run(add(1, 2)) == 3
    assert weather.__doc__.startswith("Tell")
    assert repr(add) == "<tool sum>"


@pytest.mark.parametrize(
    ("text", "summary", "arguments"),
    [
        ("", "", {}),
        ("One line.", "One line.", {}),
        ("S.\n\nArgs:\n    a (int): A.\n    b: B\n        goes on.\n", "S.", {"a": "A.", "b": "B goes on."}),
        (
            "S.\n\n:param a: A\n    goes on.\n:type a: int\n:returns: c",
            "S.",
            {"a": "A goes on."},
        ),
        ("S.\n\nArgs:\n    *rest: R.\n\nReturns:\n    x: no\n", "S.", {"rest": "R."}),
    ],
)
def test_docstrings(text, summary, arguments):
    assert read_docstring(text) == (summary, arguments)


def test_functions_that_cannot_be_tools():
    def untyped(a): ...
    def many(*a: int): ...
    def options(**a: int): ...
    def positional(a: int, /): ...
    def opaque(a: threading.Lock): ...

    for function, message in (
        (untyped, "has no type"),
        (many, "cannot be given by name"),
        (options, "cannot be given by name"),
        (positional, "cannot be given by name"),
        (opaque, "no JSON schema"),
        (lambda a: a, "cannot be the name"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            rm.tool(function)
    with pytest.raises(InvalidRequest, match="cannot be the name"):
        rm.tool(name="two words")(divide)
    with pytest.raises(InvalidRequest, match="timeout"):
        rm.tool(timeout=0)(divide)


def test_annotations_may_be_local_names():
    Level = Literal["low", "high"]

    @rm.tool
    def alarm(level: Level) -> None:
        """Ring."""

    assert alarm.parameters["properties"]["level"]["enum"] == ["low", "high"]


RUN = {
    "type": "object",
    "properties": {"code": {"type": "string", "minLength": 2}, "is": {"$ref": "#/definitions/mode"}},
    "required": ["code"],
    "definitions": {"mode": {"enum": ["fast", "safe"]}},
}


def test_a_tool_of_a_json_schema():
    given = []

    def call(**arguments):
        given.append(arguments)
        return {"ran": arguments["code"]}

    run = rm.Tool.from_schema("run", "Runs code.", RUN, call)
    assert (run.name, run.description, run.parameters) == ("run", "Runs code.", RUN)

    @rm.function
    def program(s):
        s += rm.system("You help.", tools=[run]) + rm.user("Go.")
        return list(s.call_tools([run]))

    backend = rm.ScriptedBackend([after_trigger(written("run", **{"code": "ab", "is": "fast"}))])
    state = program.run(backend=backend)
    assert [(call.result, call.shown) for call in state.ret_value] == [({"ran": "ab"}, '{"ran":"ab"}')]
    assert given == [{"code": "ab", "is": "fast"}]
    assert '"name":"run","description":"Runs code."' in state.text()
    assert "#/definitions/mode" in backend.requests[0].constraint.source


def test_arguments_of_a_json_schema_are_validated():
    run = rm.Tool.from_schema("run", "", RUN, print)
    assert run.read('{"code": "ab"}') == {"code": "ab"}
    for wrong, message in (
        ('{"code": "a", "is": "slow"}', "At /code: .* At /is: "),
        ("[]", "the whole value"),
        ("{}", "'code' is missing"),
        ("x", "Expecting value"),
    ):
        with pytest.raises(ValueError, match=message):
            run.read(wrong)


@pytest.mark.parametrize("parameters", [RUN, RUN | {"properties": {"code": {"$ref": "#/properties/is"}}}])
def test_references_of_a_json_schema_hold_inside_the_schema_of_calls(parameters):
    parameters["properties"]["is"] = {"enum": ["fast", "safe"]}
    run = rm.Tool.from_schema("run", "", parameters, print)
    source = json.loads(JsonCalls().constraint([run, add], True, 2).source)
    valid = {"calls": [{"name": "run", "arguments": {"code": "fast", "is": "safe"}}]}
    jsonschema.Draft202012Validator(source).validate(valid)
    for code in ("f", 3):
        wrong = {"calls": [{"name": "run", "arguments": {"code": code}}]}
        assert not jsonschema.Draft202012Validator(source).is_valid(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "two words"}, "cannot be the name"),
        ({"name": 3}, "cannot be the name"),
        ({"call": "print"}, "'print' is no function, so run cannot call it"),
        ({"parameters": {"properties": {}}}, "no JSON Schema of an object"),
        ({"parameters": '{"type": "object"}'}, "no JSON Schema of an object"),
        ({"parameters": {"type": "object", "required": "code"}}, "required"),
        ({"parameters": {"type": "object", "properties": {"a": {"$ref": "#/no"}}}}, "#/no"),
        ({"timeout": 0}, "timeout is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
    ],
)
def test_a_json_schema_that_makes_no_tool(change, message):
    given = {"name": "run", "description": "", "parameters": RUN, "call": print, **change}
    with pytest.raises(InvalidRequest, match=message):
        rm.Tool.from_schema(**given)


def test_what_a_plain_function_returns_is_awaited():
    async def later(code: str) -> str:
        await asyncio.sleep(0)
        return code[::-1]

    run = rm.Tool.from_schema("run", "", RUN, lambda **arguments: later(**arguments))
    (call,) = called(run, written("run", code="ab"))
    assert call.result == "ba"


# --- turns --------------------------------------------------------------------------------------


def test_calls_run_and_their_results_are_a_turn():
    calls = after_trigger(written("sum", a=2, b=3), written("weather", place={"city": "Delft"}))
    backend = rm.ScriptedBackend({"calls": calls, "answer": "Done."})
    state = ask.run(backend=backend)
    first, second = state["calls"]
    assert (first.name, first.arguments, first.result, first.error) == ("sum", {"a": 2, "b": 3}, 5, None)
    assert (second.result, second.shown) == ("20 C in Delft", "20 C in Delft")
    assert second.arguments == {"place": Place(city="Delft")}
    system, user, called, results, answer = state.messages()
    assert system["content"].startswith("You help.\n\nYou can call functions.")
    assert '"name":"weather"' in system["content"]
    assert called == {"role": "assistant", "content": "<tool_call>" + calls}
    assert results == {
        "role": "user",
        "content": "<tool_response>\n5\n</tool_response>\n<tool_response>\n20 C in Delft\n</tool_response>",
    }
    assert answer["content"] == "Done."
    assert user["content"] == "What now?"
    assert backend.requests[0].prompt[0].endswith("<|im_start|>assistant\n<tool_call>")


def test_the_trace_has_the_calls():
    calls = after_trigger(written("sum", a=2, b=3), written("divide", a=1, b=0))
    state = ask.run(backend=rm.ScriptedBackend({"calls": calls, "answer": "Done."}))
    steps = [(call.kind, call.name, call.text, call.error) for call in state.trace.children]
    assert steps == [
        ("gen", "calls", calls, None),
        ("tool", "sum", "5", None),
        ("tool", "divide", "", "float division by zero"),
        ("gen", "answer", "Done.", None),
    ]
    assert state.trace.requests == 2
    _, fine, failed, _ = str(state.trace).splitlines()[1:]
    assert fine.endswith("""s  {"a": 2, "b": 3} → '5'""")
    assert failed.endswith("""s  {"a": 1, "b": 0} → failed: float division by zero""")
    data = state.trace.to_dict()["children"]
    assert [call["arguments"] for call in data] == [None, '{"a": 2, "b": 3}', '{"a": 1, "b": 0}', None]
    assert [call["arguments"] for call in report_data(state.trace)["root"]["children"]][1] == data[1][
        "arguments"
    ]


@pytest.mark.parametrize("described", [TOOLS, [add], []])
def test_a_warning_about_tools_that_the_model_was_not_told_of(described, caplog):
    def program(s):
        s += rm.user("Go.") if not described else rm.system("Help.", tools=described) + rm.user("Go.")
        for fork in s.fork(2):
            fork.call_tools(TOOLS, "calls")
        s.fork(1).join()

    program.__name__ = f"telling_of_{len(described)}"  # a program is warned of once
    with caplog.at_level("WARNING"):
        for _ in range(2):
            backend = rm.ScriptedBackend({"calls": after_trigger(written("sum", a=2, b=3))})
            assert rm.function(program).run(backend=backend).error() is None
    untold = ", ".join(
        tool.name if isinstance(tool, rm.Tool) else "divide" for tool in TOOLS if tool not in described
    )
    assert len(caplog.messages) == bool(untold)
    for message in caplog.messages:
        assert message.startswith(f"{program.__name__} calls tools at {__file__}:")
        assert f"told the model of: {untold}. " in message
        assert message.endswith("Write system(..., tools=...) or user(..., tools=...) before it.")


@pytest.mark.parametrize("told", [True, False])
def test_a_program_without_turns_tells_of_tools_in_its_own_words(told, caplog):
    @rm.function
    def program(s):
        s += "You can call sum.\n" if told else "2 + 3?\n"
        s.call_tools([add], "calls")

    answers = {"calls": after_trigger(written("sum", a=2, b=3))}
    with caplog.at_level("WARNING"):
        assert program.run(backend=rm.ScriptedBackend(answers, chat_format=None)).error() is None
    assert [message.endswith("Describe them in the prompt.") for message in caplog.messages] == [True] * (
        not told
    )


@pytest.mark.parametrize(
    "answer",
    [
        after_trigger(written("nothing", a=1)),
        after_trigger(written("sum", a="x", b=1)),
        after_trigger(written("sum", a=1, b=-1)),
        after_trigger(written("sum", a=1)),
        after_trigger(written("sum", a=1, b=1), written("sum", a=1, b=2), written("sum", a=1, b=3)),
        "I would rather not.",
    ],
)
def test_the_constraint_lets_nothing_else_through(answer):
    with pytest.raises(rm.NotScripted, match="breaks its structural_tag"):
        ask.run(max_calls=2, backend=rm.ScriptedBackend({"calls": answer}))


def test_an_error_is_a_result():
    calls = after_trigger(written("divide", a=1, b=0), written("divide", a=1, b=2))
    state = ask.run(backend=rm.ScriptedBackend({"calls": calls, "answer": "Hm."}))
    failed, fine = state["calls"]
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.shown == "Error: ZeroDivisionError: float division by zero."
    assert fine.result == 0.5
    assert f"<tool_response>\n{failed.shown}\n</tool_response>" in state.text()


def test_an_error_is_raised_where_asked_for():
    backend = rm.ScriptedBackend({"calls": after_trigger(written("divide", a=1, b=0))})
    state = ask.run(errors="raise", backend=backend)
    with pytest.raises(rm.ProgramError, match="The tool divide raised float division by zero") as failed:
        state["calls"]
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert failed.value.line.startswith(__file__)
    assert failed.value.partial.endswith("</tool_call>")
    assert "What now?" in failed.value.prompt


def test_a_result_that_is_no_json_is_an_error():
    @rm.tool
    def opaque() -> object:
        """Return something."""
        return object()

    (call,) = called(opaque, written("opaque"))
    assert call.error is not None


def test_a_model_may_answer_in_words():
    @rm.function
    def program(s):
        s += rm.user("Go.", tools=TOOLS)
        turn = s.call_tools(TOOLS, "calls", required=False)
        return list(turn), turn.text

    state = program.run(backend=rm.ScriptedBackend(["No need to."]))
    assert state.ret_value == ([], "No need to.")
    assert state.messages()[-1] == {"role": "assistant", "content": "No need to."}
    with pytest.raises(rm.NotScripted, match="structural_tag"):  # words and calls are not mixed
        program.run(backend=rm.ScriptedBackend(["I add: " + written("sum", a=1, b=2)]))
    called = program.run(backend=rm.ScriptedBackend([written("sum", a=1, b=2)]))
    assert [call.result for call in called["calls"]] == [3]
    assert called.messages()[-1]["role"] == "user"


def test_calls_of_a_program_without_turns():
    @rm.function
    def program(s):
        s += "Question: 2 + 3?\n"
        s.call_tools([add], "calls")
        s += "Answer:" + rm.gen("answer")

    backend = rm.ScriptedBackend(
        {"calls": after_trigger(written("sum", a=2, b=3)), "answer": " 5."}, chat_format=None
    )
    state = program.run(backend=backend)
    assert state.text() == (
        "Question: 2 + 3?\n" + written("sum", a=2, b=3) + "\n<tool_response>\n5\n</tool_response>\nAnswer: 5."
    )


def test_a_cut_off_call_fails():
    class Cut(rm.ScriptedBackend):
        """A backend that ends its output early, as an endpoint without our grammars may."""

        def _answer(self, request: Generate) -> str:
            return '\n{"name": "sum", "arguments": {"a": 1'

    error = ask.run(backend=Cut([])).error()
    assert "ended inside a call" in str(error)


def test_turns_that_are_open_are_not_written_into():
    @rm.function
    def program(s):
        with s.assistant():
            s.call_tools(TOOLS)

    assert "assistant turn is open" in str(program.run(backend=rm.ScriptedBackend([])).error())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": []}, "not empty"),
        ({"tools": divide}, "must be a list"),
        ({"tools": ["divide"]}, "'divide' is no function"),
        ({"tools": [divide, divide]}, "Two tools are named"),
        ({"tools": TOOLS, "errors": "hide"}, "errors is 'hide'"),
        ({"tools": TOOLS, "max_calls": 0}, "max_calls is 0"),
        ({"tools": TOOLS, "retries": 1}, "no option 'retries'"),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    @rm.function
    def program(s):
        s.call_tools(**arguments)

    with pytest.raises(InvalidRequest, match=message):
        program.run(backend=rm.ScriptedBackend([]))


# --- running ------------------------------------------------------------------------------------


def test_plain_functions_run_in_threads_at_once():
    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(10)
        return number

    calls = called(meet, *(written("meet", number=number) for number in range(3)))
    assert [call.result for call in calls] == [0, 1, 2]


async def test_coroutines_run_at_once_in_the_programs_loop():
    met = asyncio.Barrier(3)
    loop = asyncio.get_running_loop()

    async def meet(number: int) -> int:
        assert asyncio.get_running_loop() is loop
        await met.wait()
        return number

    @rm.function
    async def program(s):
        s += rm.user("Go.")
        calls = await s.call_tools([meet])
        return [call.result for call in calls]

    calls = after_trigger(*(written("meet", number=number) for number in range(3)))
    assert (await program.run(backend=rm.ScriptedBackend([calls]))).ret_value == [0, 1, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tool_that_takes_too_long(asynchronous):
    release = Event()

    async def slow() -> None:
        await release.wait()

    def slow_thread() -> None:
        release.block()

    tool = rm.tool(timeout=0.02)(slow if asynchronous else slow_thread)
    (call,) = called(tool, written(tool.name))
    release.set()
    assert isinstance(call.error, RequestTimeout)
    assert "took longer than 0.02 s" in call.shown


@pytest.mark.parametrize("asynchronous", [True, False])
def test_calls_of_a_tool_wait_for_its_limit(asynchronous):
    """Two calls run at once, over all branches and rows; the third begins when one has ended."""
    running: set[int] = set()
    most: list[int] = []
    pair = threading.Barrier(2)

    def begin(number: int) -> int:
        running.add(number)
        most.append(len(running))
        pair.wait(10)  # not before two run
        running.discard(number)
        pair.wait(10)  # so that neither ends, and lets a third in, while one counts itself
        return number

    async def begin_async(number: int) -> int:
        return await asyncio.to_thread(begin, number)

    tool = rm.tool(name="begin", concurrency=2)(begin_async if asynchronous else begin)

    @rm.function
    def program(s, row: int):
        s += rm.user("Go.", tools=[tool])
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += rm.user(f"{index}")
            fork.call_tools([tool], f"calls {row} {index}")
        return [call.result for index, fork in enumerate(forks) for call in fork[f"calls {row} {index}"]]

    answers = {
        f"calls {row} {index}": after_trigger(
            *(written("begin", number=4 * row + 2 * index + call) for call in range(2))
        )
        for row in range(2)
        for index in range(2)
    }
    rows = program.run_batch([{"row": 0}, {"row": 1}], backend=rm.ScriptedBackend(answers))
    assert [state.ret_value for state in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert max(most) == 2


def test_waiting_for_the_limit_does_not_count_for_the_timeout():
    release, begun = Event(), []

    async def slow(number: int) -> int:
        begun.append(number)
        if number == 0:
            await release.wait()
        return number

    tool = rm.tool(concurrency=1, timeout=0.05)(slow)
    calls = called(tool, *(written("slow", number=number) for number in range(3)))
    release.set()
    assert begun == [0, 1, 2]
    assert [type(call.error) for call in calls] == [RequestTimeout, type(None), type(None)]


def test_a_tool_may_run_a_program():
    backend = rm.ScriptedBackend(
        {"outer": after_trigger(written("inner")), "deep": after_trigger(written("leaf"))}
    )

    def leaf() -> str:
        return "leaf!"

    @rm.function
    def below(s):
        s += rm.user("Deeper.")
        s.call_tools([leaf], "deep")
        return s["deep"][0].result

    def inner() -> str:
        return below.run(backend=backend).ret_value

    @rm.function
    def program(s):
        s += rm.user("Go.")
        s.call_tools([inner], "outer")
        return s["outer"][0].result

    state = program.run(backend=backend)
    assert state.ret_value == "leaf!"
    (line,) = [line for line in str(state.trace).splitlines() if "tool inner" in line]
    assert re.search(r"prompt +\d+ = .* \{\} → 'leaf!'$", line)  # what the program inside has used


async def test_cancelling_the_program_cancels_its_tools():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @rm.function
    async def program(s):
        s += rm.user("Go.")
        await s.call_tools([slow])

    task = asyncio.create_task(program.run(backend=rm.ScriptedBackend([after_trigger(written("slow"))])))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ended.wait()


def test_calls_are_streamed():
    calls = after_trigger(written("sum", a=2, b=3))
    state = ask.run(backend=rm.ScriptedBackend({"calls": calls, "answer": "Done."}), stream=True)
    assert "".join(state.text_iter("calls")) == calls
    assert "".join(state.text_iter()) == state.text()


# --- on an engine -------------------------------------------------------------------------------


def test_a_real_model_calls_exactly_to_schema(engine, endpoint):
    def note(text: Annotated[str, pydantic.Field(max_length=12)], level: Literal[1, 2, 3]) -> str:
        return text[::-1]

    def stop() -> None:
        """Stop."""

    colour = {"$defs": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    colour |= {"properties": {"colour": {"$ref": "#/$defs/colour"}}, "additionalProperties": False}
    paint = rm.Tool.from_schema("paint", "Paint.", {"type": "object", **colour}, lambda colour: colour)
    tools = [note, stop, paint]

    @rm.function
    def program(s):
        s += rm.system("You help.", tools=tools)
        for turn in range(4):
            s += rm.user(f"Turn {turn}.")
            offered = tools if turn < 3 else [paint]
            s.call_tools(offered, f"calls {turn}", 160, max_calls=2, temperature=0.0)
        s.call_tools(tools, "free", 60, required=False, temperature=0.0)
        return [[call.name for call in s[f"calls {turn}"]] for turn in range(4)]

    here = program.run(backend=engine)
    assert all(1 <= len(names) <= 2 for names in here.ret_value)
    assert all(call.error is None for turn in range(4) for call in here[f"calls {turn}"])
    assert {call.result for call in here["calls 3"]} <= {"red", "blue"}
    assert program.run(backend=engine, compiled=True).text() == here.text()
    assert program.run(backend=endpoint).text() == here.text()


def test_a_schema_that_cannot_be_enforced_names_its_tool(engine):
    text = {"type": "string", "pattern": "(?=a)b"}
    parameters = {"type": "object", "properties": {"a": text}}
    odd = rm.Tool.from_schema("odd", "", parameters, print, strict=True)

    @rm.function
    def program(s, tool):
        s += rm.user("Go.", tools=[add, tool])
        s.call_tools([add, tool], "calls", max_tokens=60)

    error = program.run(odd, backend=engine).error()
    assert "failed: The parameters of the tool odd: A lookahead is not supported" in str(error)
    assert error.pointer == "/properties/a/pattern"
    # By default it is left out, and told.
    state = program.run(rm.Tool.from_schema("odd", "", parameters, print), backend=engine)
    (left,) = state.get_meta_info("calls")["unenforced"]
    assert (left.tool, left.schema) == ("odd", "/properties/a/pattern")
