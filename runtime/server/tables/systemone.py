"""The fields of TypeSafe's ``/v1/systemone``."""

from __future__ import annotations

from ramify.runtime.server.tables.decisions import ASKING
from ramify.runtime.server.tables.openai import PROMPT_CACHE_OPTIONS, REQUEST, STREAM_OPTIONS
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, refused, taken

QUESTION = FieldTable("questions.*", taken("type instructions criteria"))
OUTCOMES = FieldTable("questions.*.criteria", taken("true false", "of a `noul`"))

SYSTEM_ONE = Endpoint(
    title="System One",
    path="/v1/systemone",
    shared=(REQUEST, ASKING),
    body=FieldTable(
        "",
        taken("state", "a text; an object or array is read as one line of JSON"),
        taken(
            "questions",
            "1 to 400 by name: `noul`; `choice`, whose `criteria` have 1 to 255 names, with a description or"
            " null; `score` with 1 to 10 levels. Texts may be objects or arrays, as in `state`",
        ),
        refused("assets", "Images are not supported."),
    ),
    inner=(QUESTION, OUTCOMES, STREAM_OPTIONS, PROMPT_CACHE_OPTIONS),
    required={
        "model": "default",
        "state": "x",
        "questions": {"x": {"type": "noul", "instructions": "x"}},
    },
)
ENDPOINTS = (SYSTEM_ONE,)
