"""Structural tags: free text, and tags whose content is constrained exactly."""

from __future__ import annotations

from typing import Any

import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.compile.structural_tag import compile_tag
from tests.grammar.vocabularies import accepts, compiled
from tests.grammar.xgrammar_oracle import of_structural_tag

NESTED = 'root ::= "(" root ")" | ""'

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
CALL = {"begin": "<call=weather>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</call>"}
FORMS: dict[str, dict[str, Any]] = {
    "triggered": {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL]},
    },
    "older form": {
        "structures": [{"begin": CALL["begin"], "schema": CITY, "end": CALL["end"]}],
        "triggers": ["<call="],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_triggered_tags(form: str) -> None:
    grammar = compiled(constraint.structural_tag(FORMS[form]))
    for text in (
        "no tag at all",
        '<call=weather>{"city": "Zürich"}</call>',
        'Let me see. <call=weather>{"city": "Bonn"}</call> and <call=weather>{"city": ""}</call>.',
    ):
        assert accepts(grammar, text), text
    for text in (
        '<call=weather>{"city": "Zürich"}',
        '<call=weather>{"city": 1}</call>',
        '<call=weather>{"city": "much too long"}</call>',
        "<call=time>{}</call>",
    ):
        assert not accepts(grammar, text), text


def test_a_sequence_with_a_regex() -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "id: "},
                {"type": "regex", "pattern": r"[a-f]{2}-\d+"},
                {"type": "optional", "content": {"type": "const_string", "value": "!"}},
            ],
        },
    }
    grammar = compiled(constraint.structural_tag(tag))
    assert accepts(grammar, "id: ab-12")
    assert accepts(grammar, "id: ab-12!")
    assert not accepts(grammar, "id: ag-12")


TAG = {"begin": "<a>", "content": {"type": "const_string", "value": "x"}, "end": "</a>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}
SEPARATED = {"type": "tags_with_separator", "separator": ",", "tags": [TAG]}
ANY: dict[str, Any] = {"type": "any_text"}
SEQUENCE = {"type": "const_string", "value": "END"}
SEMANTICS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "triggered": (
        TRIGGERED,
        ["", "t", "<a>x</a>", "t<a>x</a>t", "<a>x</a><a>x</a>", "t<", "<<a>x</a>"],
        ["<a", "<a>y</a>", "<ab"],
    ),
    "at least one": (
        TRIGGERED | {"at_least_one": True},
        ["<a>x</a>", "<a>x</a>t", "<a>x</a>t<a>x</a>"],
        ["", "t", "t<a>x</a>"],
    ),
    "stop after first": (
        TRIGGERED | {"stop_after_first": True},
        ["", "t", "<a>x</a>", "t<a>x</a>"],
        ["t<a>x</a>t", "<a>x</a><a>x</a>"],
    ),
    "exactly one": (
        TRIGGERED | {"stop_after_first": True, "at_least_one": True},
        ["<a>x</a>"],
        ["", "t", "t<a>x</a>", "<a>x</a>t"],
    ),
    "excludes": (
        TRIGGERED | {"excludes": ["no", "never"]},
        ["n", "n<a>x</a>", "neve", "nn"],
        ["no", "a no b", "<a>x</a>no", "nneverx"],
    ),
    "two triggers, one the end of the other": (
        TRIGGERED
        | {
            "triggers": ["a<b", "<b"],
            "tags": [
                {"begin": "a<b1", "content": ANY, "end": "."},
                {"begin": "<b2", "content": SEQUENCE, "end": "."},
            ],
        },
        ["a<b1hm.", "<b2END.", "c<b2END.", "a<b1."],
        ["<b1.", "a<b3", "<b2."],
    ),
    "separator": (SEPARATED, ["", "<a>x</a>", "<a>x</a>,<a>x</a>"], ["<a>x</a>,", ",<a>x</a>"]),
    "separator, at least one": (SEPARATED | {"at_least_one": True}, ["<a>x</a>", "<a>x</a>,<a>x</a>"], [""]),
    "separator, at most one": (
        SEPARATED | {"stop_after_first": True},
        ["", "<a>x</a>"],
        ["<a>x</a>,<a>x</a>"],
    ),
    "any text": (ANY, ["", "abc\n日"], []),
    "any text but": (ANY | {"excludes": ["no"]}, ["", "abc", "n"], ["a no"]),
    "any text in a tag": (
        {"type": "tag", "begin": "<a>", "content": ANY, "end": "</a>"},
        ["<a></a>", "<a>q</a>", "<a><</a>", "<a></</a>"],
        ["<a>q</a>q", "<a>q</a>q</a>", "<a>"],
    ),
    "any text in a tag of two ends": (
        {"type": "tag", "begin": "<a>", "content": ANY, "end": ["</a>", "</b>"]},
        ["<a></a>", "<a>c</b>"],
        ["<a></a></b>"],
    ),
    "any text before something": (
        {"type": "sequence", "elements": [ANY, SEQUENCE]},
        ["END", "xEND", "xENDyEND"],
        ["x"],
    ),
    "any text up to something": (
        {"type": "sequence", "elements": [ANY | {"excludes": ["END"]}, SEQUENCE]},
        ["END", "xEND"],
        ["x", "xENDyEND"],
    ),
    "triggered in a tag": (
        {"type": "tag", "begin": "[", "content": TRIGGERED, "end": "]"},
        ["[]", "[t]", "[t<a>x</a>]", "[<]"],
        ["[a]b]", "[", "[<a]"],
    ),
    "once or twice": (
        {"type": "repeat", "content": SEQUENCE, "min": 1, "max": 2},
        ["END", "ENDEND"],
        ["", "ENDENDEND"],
    ),
    "any number of times": (
        {"type": "repeat", "content": SEQUENCE, "min": 1, "max": -1},
        ["END", "ENDEND", "ENDENDEND"],
        [""],
    ),
    "plus, star, optional": (
        {
            "type": "sequence",
            "elements": [
                {"type": "plus", "content": {"type": "const_string", "value": "p"}},
                {"type": "star", "content": {"type": "const_string", "value": "s"}},
                {"type": "optional", "content": {"type": "const_string", "value": "o"}},
            ],
        },
        ["p", "pp", "psso", "po"],
        ["", "s", "pos", "poo"],
    ),
    "or": (
        {"type": "or", "elements": [TAG | {"type": "tag"}, SEQUENCE]},
        ["END", "<a>x</a>"],
        ["", "ENDEND"],
    ),
    "a grammar": (
        {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": NESTED}, "end": ">"},
        ["<(())>", "<>"],
        ["<(()>", "()"],
    ),
}


@pytest.mark.parametrize("name", SEMANTICS)
def test_the_formats_mean_what_xgrammar_has_them_mean(name: str) -> None:
    form, inside, outside = SEMANTICS[name]
    tag = {"type": "structural_tag", "format": form}
    ours, theirs = compiled(constraint.structural_tag(tag)), of_structural_tag(tag)
    for wanted, texts in ((True, inside), (False, outside)):
        for text in texts:
            assert accepts(ours, text) == theirs.accepts(text) == wanted, text


@pytest.mark.parametrize(
    ("form", "pointer"),
    [
        ({"type": "token"}, "/format/type"),
        ({"type": "any_text", "max": 3}, "/format/max"),
        ({"type": "tag", "begin": 1, "content": ANY, "end": ""}, "/format/begin"),
        ({"type": "tag", "begin": "", "content": ANY, "end": []}, "/format/end"),
        ({"type": "tag", "begin": "", "end": ""}, "/format"),
        ({"type": "sequence", "elements": [ANY, 1]}, "/format/elements/1"),
        ({"type": "or", "elements": 1}, "/format/elements"),
        ({"type": "regex", "pattern": "(?=a)"}, "/format/pattern"),
        ({"type": "grammar", "grammar": "root ::= x"}, "/format/grammar"),
        ({"type": "json_schema", "json_schema": {"type": "strin"}}, "/format/json_schema/type"),
        (TRIGGERED | {"triggers": ["<b"]}, "/format/tags/0/begin"),
        (TRIGGERED | {"triggers": []}, "/format/triggers"),
        (TRIGGERED | {"tags": [TAG | {"content": {"type": "what"}}]}, "/format/tags/0/content/type"),
        (TRIGGERED | {"at_least_one": 1}, "/format/at_least_one"),
        ({"type": "repeat", "content": ANY, "min": 2, "max": 1}, "/format/min"),
        ({"type": "or", "elements": []}, ""),
    ],
)
def test_what_is_wrong_is_pointed_at(form: dict[str, Any], pointer: str) -> None:
    with pytest.raises(InvalidConstraint) as error:
        compile_tag({"type": "structural_tag", "format": form})
    assert error.value.pointer == pointer
