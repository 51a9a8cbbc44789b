"""Bodies that cannot be traced are refused with their line, and the source's meaning is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from tests.lang.compiling import line_of, refusal


def decides(s):
    s += "Q" + rm.gen("x")
    if s["x"]:  # truth
        s += "yes"


def loops(s, questions):
    for question in questions:  # items
        s += question + rm.gen("x")


def compares(s):
    s += rm.select("x", ["a", "b"])
    return {"a": 1}[s["x"]]  # lookup


def counts(s):
    s += rm.gen("n", schema=int)
    total = s["n"] + 1  # sum
    s += str(total)


def looks_up(s):
    s += rm.gen("x")
    s += json.loads(s["x"])["a"]  # loads


def matches(s):
    s += rm.gen("x")
    s += "a" if re.match("a", s["x"]) else "b"  # match


def catches(s):
    s += rm.gen("x")
    try:
        s += re.sub("a", "b", s["x"])
    except Exception:  # caught
        s += "none"


def recovers(s):
    s += rm.gen("x")
    try:  # falls back
        x = s["x"]
    except rm.ProgramError:
        s.recover()
        x = "none"
    s += x


def recovers_at_once(s):
    s += rm.gen("x")
    s.recover()  # at once


def checks_type(s, value):
    if isinstance(value, str):  # isinstance
        s += value + rm.gen("x")


def asks_type(s, value):
    s += "text" if type(value) is str else "none"  # type


def formats(s):
    s += rm.gen("x")
    s += f"{s['x']:>10}"  # format


def old_formats(s):
    s += rm.gen("x")
    s += "%s" % s["x"]  # percent  # noqa: UP031


def strips(s):
    s += rm.gen("x")
    s += s["x"].removeprefix("a")  # strip


def prints(s):
    s += rm.gen("x")
    print(s.text())  # whole


def a_tool(word: str) -> str:
    """Says it again."""
    return word


def uses_tools(s):
    s += "Q"
    turn = s.call_tools([a_tool])
    while turn:  # tools
        turn = s.call_tools([a_tool])


def returns(s):
    s += rm.gen("x")
    return {1, 2}


def nothing(s):
    return None


def fails(s):
    s += 1 / len("")  # fails


def keeps(s):
    s += rm.gen("x")
    s["y"] = s["x"]  # keeps


def validates(s):
    s += rm.gen("x")
    x = s["x"]
    s += rm.gen("y", validate=lambda y: y != x)  # validate


def no_such_variable(s):
    s += rm.gen("x")
    s += s["y"]  # unknown


async def waits(s):
    import asyncio

    await asyncio.sleep(0)  # waits


@pytest.mark.parametrize(
    ("body", "marker", "message"),
    [
        (decides, "truth", "The result of gen 'x' is not known .* whether it is true"),
        (
            loops,
            "items",
            r"The argument 'questions' .* its items. Give it when compiling: compile\(questions=",
        ),
        (compares, "lookup", "The result of select 'x' .* its hash"),
        (counts, "sum", "The result of gen 'n' .* arithmetic"),
        (looks_up, "loads", "its type"),
        (matches, "match", "raised TypeError while it was traced: expected string"),
        (catches, "caught", "catches an exception"),
        (recovers, "falls back", "catches an exception"),
        (recovers_at_once, "at once", r"recover\(\) depends on a step that fails"),
        (checks_type, "isinstance", "The argument 'value' .* its type"),
        (asks_type, "type", "The argument 'value' .* its type"),
        (formats, "format", "a finished string"),
        (old_formats, None, "a finished string"),
        (strips, "strip", "its removeprefix"),
        (prints, "whole", r"The result of text\(\)"),
        (uses_tools, "tools", "whether it is true"),
        (returns, None, "returns a set"),
        (nothing, None, "no nodes"),
        (fails, "fails", "raised ZeroDivisionError"),
        (keeps, "keeps", "cannot be kept in the variable 'y'"),
        (validates, "validate", "validate uses a value that is not known"),
        (no_such_variable, "unknown", "sets no variable 'y'"),
        (waits, None, "waits for something other"),
    ],
)
def test_what_has_no_graph_is_refused_with_its_line(body: Any, marker: str | None, message: str):
    refused = refusal(rm.function(body))
    assert re.search(message, str(refused)), str(refused)
    assert refused.line is not None
    assert refused.line == line_of(__file__, marker) if marker else refused.line.startswith(__file__)
    assert str(refused).startswith(refused.line)


def test_a_body_runs_twice_only_where_that_is_asked_for():
    calls = []

    @rm.function
    def program(s, how):
        calls.append(how)
        s += "Q" + rm.gen("x")
        if how == "result" and s["x"] == "a":
            s += "!"
        return s["x"]

    for how, compiled, times in [
        ("result", False, 1),
        ("plain", False, 1),
        ("plain", True, 1),
        ("result", True, 2),
    ]:
        calls.clear()
        state = program.run(how, backend=rm.ScriptedBackend(["a"]), compiled=compiled)
        assert (state["x"], state.ret_value, len(calls)) == ("a", "a", times)
        assert state.text() == ("Qa!" if how == "result" else "Qa")
    calls.clear()
    made = program.compile(how="plain")
    made.run_batch([{}] * 5, backend=rm.ScriptedBackend(["a"] * 5))
    made.run(backend=rm.ScriptedBackend(["a"]), compiled=True)
    assert len(calls) == 1


def test_text_without_its_source_is_put_together_with_plus_only():
    scope: dict[str, Any] = {"rm": rm}
    exec("def body(s, a):\n  s += 'Q' + a + rm.gen('x')\n  s += 'A' + s['x']", scope)
    compiled = rm.function(scope["body"]).compile()
    assert compiled.run("?", backend=rm.ScriptedBackend(["yes"])).text() == "Q?yesAyes"
    exec("def body(s, a):\n  s += f'Q{a}'", scope)
    assert "a finished string" in str(refusal(rm.function(scope["body"])))


def test_a_source_that_has_changed_is_not_used(tmp_path: Path):
    path = tmp_path / "changing.py"
    path.write_text("def body(s, a):\n    s += f'Q{a}'\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    path.write_text("def body(s, a):\n    s += f'R{a}' + 'more'\n")
    assert "a finished string" in str(refusal(rm.function(scope["body"])))


def test_closures_and_multi_line_strings_stay_as_they_are():
    mark = "!"

    def shout(text: Any) -> Any:
        return text + mark

    @rm.function
    def program(s, topic):
        s += f"""
  {topic}
        and {mark}"""
        s += shout(topic)
        s += "/".join(part for part in ("a", topic, mark))

    assert program.compile().run("T", backend=rm.ScriptedBackend([])).text() == "\n  T\n        and !T!a/T/!"


def equals(s):
    s += rm.gen("x")
    if s["x"] == "a":
        s += "yes"


@pytest.mark.parametrize(("body", "named"), [(decides, True), (equals, True), (formats, False)])
def test_decisions_name_the_functions_that_decide(body: Any, named: bool) -> None:
    assert ("rm.when" in str(refusal(rm.function(body)))) is named
