"""Tool calls read out of an output: however it is cut into pieces, the parts are the same."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.tool_calls.formats import FORMATS, GENERIC, HERMES, ToolFormat, format_in
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
Calls = list[tuple[str, str]]
ARGUMENTS = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True),
        st.dictionaries(st.text(max_size=6), ARGUMENTS, max_size=4).map(json.dumps),
    ),
    max_size=3,
)


def written(form: ToolFormat, content: str, calls: Calls) -> str:
    before, between, after = form.call
    texts = [before + name + between + arguments + after for name, arguments in calls]
    return content + (form.begin + (form.separator or "").join(texts) + form.end if calls else "")


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, Calls, CallParser]:
    reader = CallParser(form)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.close()
    content, calls = "", []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls, reader


@each_format
@given(content=st.text(max_size=20), calls=CALLS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_gives_the_same(form: ToolFormat, content: str, calls: Calls, cuts: list[int]) -> None:
    if form.separator is None:
        calls = calls[:1]
    text = written(form, content, calls)
    if text.find(form.trigger) not in (-1, len(content)):
        return
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[low:high] for low, high in itertools.pairwise(edges)]
    found, found_calls, reader = read(form, pieces)
    assert (found, found_calls) == (content, calls)
    assert not reader.inside
    assert reader.calls == len(calls)


@each_format
def test_an_output_cut_off_between_two_calls_has_no_content(form: ToolFormat) -> None:
    if form.separator is None:
        return
    calls = [("one", "{}"), ("two", "{}")]
    first, whole = written(form, "", calls[:1]), written(form, "", calls)
    for length in range(len(first) - len(form.end), len(whole)):
        content, found, _ = read(form, [whole[:length]])
        assert content == ""
        assert found[0] == calls[0]


@each_format
def test_an_output_cut_off_says_what_there_was(form: ToolFormat) -> None:
    whole = written(form, "Well. ", [("weather", '{"city": "B}]\\"onn", "at": [1, {}]}')])
    seen = []
    for length in range(len(whole) + 1):
        content, calls, reader = read(form, [whole[:length]])
        assert "Well. ".startswith(content[:6])
        assert len(calls) <= 1
        if calls:
            assert calls[0][0] == "weather"
            assert '{"city": "B}]\\"onn", "at": [1, {}]}'.startswith(calls[0][1])
        assert reader.inside <= (length >= len("Well. " + form.trigger))
        seen.append(reader.inside)
    assert not seen[-1]
    assert seen[len("Well. " + form.trigger)]


def test_the_beginning_of_a_trigger_waits_and_is_said_when_it_is_none() -> None:
    reader = CallParser(HERMES)
    assert reader.push("a <tool") == [Content("a ")]
    assert reader.push("_call") == []
    assert reader.push("s> b <") == [Content("<tool_calls> b ")]
    assert reader.close() == [Content("<")]


def test_the_format_in_a_conversation() -> None:
    for row in FORMATS.values():
        shown = format_in("before " + written(row, "", [("look_up", "{}")]) + " after", "look_up")
        assert shown is (row if row.native else HERMES)
    assert format_in("<tool_call>\n<function=look_up>", "look_up") is GENERIC


@each_format
def test_rows_are_consistent(form: ToolFormat) -> None:
    assert form.opening.startswith(form.trigger)
    assert form.native == (form is not GENERIC)
    assert len(form.new_id()) == len(form.id_prefix) + form.id_length
    assert form.new_id() != form.new_id()
