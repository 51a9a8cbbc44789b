"""A graph to look at: text, flowchart and drawing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import ramify as rm
from ramify.lang.graph.svg import columns_of
from tests.lang.compiling import line_of


def test_a_graph_as_text_flowchart_and_drawing():
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
    chart = view.mermaid().splitlines()
    assert chart[:2] == ["flowchart TD", """  n0["'Say #quot;#lt;b#gt;#quot; of ' + topic"]"""]
    assert "  n4([\"select y ('a', 'b')\"])" in chart
    for edge in ("n2 --> n3", "n2 --> n5", "n1 -.-> n3", "n4 --> n7", "n6 --> n7", "n6 -.-> n8"):
        assert f"  {edge}" in chart
    drawing = ElementTree.fromstring(view.svg())
    boxes = list(drawing.iter("{http://www.w3.org/2000/svg}rect"))
    places = [(float(box.get("x", 0)), float(box.get("y", 0))) for box in boxes]
    assert len(set(places)) == len(places) == 9
    assert places[3][1] == places[5][1] > places[2][1]
    assert places[3][0] != places[5][0]
    assert "http" not in view.svg().replace("http://www.w3.org/2000/svg", "")


def test_columns_are_used_again_after_a_join_only():
    @rm.function
    def program(s):
        for _ in range(2):
            forks = s.fork(2)
            forks += "a"
            forks.join()
        for fork in s.fork(1), s.fork(1):
            fork += "b"

    columns = columns_of(program.compile().graph().graph)
    assert [columns[branch] for branch in range(7)] == [0, 1, 2, 1, 2, 1, 2]
