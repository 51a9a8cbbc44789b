"""A graph as text and as a flowchart."""

from __future__ import annotations

import re

import pytest

import ramify as rm
from ramify.errors import UnsupportedNode
from ramify.lang.calls.choices import METHODS, TokenLengthNormalized
from tests.lang.compiling import line_of
from tests.lang.steps import program_of


def test_a_graph_as_text_and_flowchart():
    @rm.function
    def program(s, topic):
        s += 'Say "<b>" of ' + topic + rm.gen("x", max_tokens=3)  # gen
        forks = s.fork(2)
        for fork in forks:
            fork += "on" + s["x"] + rm.select("y", ["a", "b"])  # select
        forks.join()
        s += forks["y"][1].strip()

    view = program.compile().graph()
    lines = [line.rstrip() for line in str(view).splitlines()]
    assert lines[0] == "program(topic)"
    assert lines[1] == """   0  'Say "<b>" of ' + topic"""
    assert re.fullmatch(rf"   1  gen x \(max_tokens=3\) +{re.escape(line_of(__file__, 'gen'))}", lines[2])
    assert lines[3] == "   2  fork into [1], [2]"
    assert lines[4] == "   3    [1] 'on' + ‹x›"
    assert lines[-2:] == ["   7  gather [1], [2]", "   8  ‹[2] y›.strip()"]
    assert view.mermaid().splitlines() == [
        "flowchart TD",
        '  n1(["gen x (max_tokens=3)"])',
        """  n4(["[1] select y ('a', 'b')"])""",
        """  n6(["[2] select y ('a', 'b')"])""",
        "  n1 --> n4",
        "  n1 --> n6",
    ]


def test_the_flowchart_shows_what_calls_wait_for():
    @rm.function
    def program(s):
        forks = s.fork(2)
        for fork in forks:
            fork += 'Say "<b>":' + rm.gen("x")
        forks.join()
        s += forks["x"][1].strip() + rm.gen("y")
        s += "." + rm.gen("#")

    chart = program.compile().graph().mermaid().splitlines()
    assert chart[1:] == [
        '  n2(["[1] gen x"])',
        '  n4(["[2] gen x"])',
        '  n7(["gen y"])',
        '  n9(["gen #35;"])',
        "  n2 --> n7",
        "  n4 --> n7",
        "  n7 --> n9",
    ]


def test_results_in_a_text_are_waited_for_as_well():
    @rm.function
    def program(s):
        one, other = s.fork(1)[0], s.fork(1)[0]
        one += "a" + rm.gen("x")
        other += one["x"] + rm.gen("y")

    edges = [line for line in program.compile().graph().mermaid().splitlines() if ">" in line]
    assert len(edges) == 1
    assert "-.->" in edges[0]


def _tool(x: int) -> str:
    """A tool."""
    return str(x)


@pytest.mark.parametrize(
    ("argument", "append"),
    [
        ("backend", lambda s: s.__iadd__(rm.gen("x", backend="big"))),
        ("backend", lambda s: s.__iadd__(rm.select("x", ["a"], backend=rm.ScriptedBackend([])))),
        ("retries", lambda s: s.__iadd__(rm.gen("x", schema=int, retries=2))),
        ("validate", lambda s: s.__iadd__(rm.gen("x", validate=len))),
        (
            "choices_method",
            lambda s: s.__iadd__(rm.select("x", ["a"], choices_method=TokenLengthNormalized())),
        ),
        ("errors", lambda s: s.call_tools([_tool], errors="raise")),
    ],
)
def test_a_graph_without_an_argument_of_its_program_is_not_given_away(argument, append):
    @rm.function
    def program(s):
        s += "a" + rm.gen("before")
        append(s)

    view = program.compile().graph()
    assert "before" in str(view)
    assert "before" in view.mermaid()
    with pytest.raises(UnsupportedNode, match=f"Node 2, .*{argument}=") as refused:
        _ = view.graph
    assert refused.value.field == argument
    assert argument in refused.value.remedy


@pytest.mark.parametrize("method", [rm.greedy_token_selection, rm.unconditional_likelihood_normalized])
def test_a_graph_names_the_method_of_a_select(method):
    program = program_of("a" + rm.select("x", ["a", "b"], choices_method=method, timeout=2.0, lora="m"))
    (select,) = program.compile().graph().graph.nodes[1:]
    assert METHODS[select.method] is method
    assert (select.timeout, select.lora) == (2.0, "m")
