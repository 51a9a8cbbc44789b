"""The fields of decisions."""

from __future__ import annotations

from ramify.runtime.server.tables.openai import PART, PROMPT_CACHE_OPTIONS, REQUEST, STREAM_OPTIONS
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, refused, taken

ASKING = FieldTable(
    "",
    taken(
        "layout",
        "the way in which questions are written: `auto`, `verbatim`, `labels`, `isolated` or `trained`",
    ),
    taken(
        "end",
        "the event that an option's tokens end: `prefix`, or `turn` for an end-of-turn token behind them",
    ),
    taken(
        "permutations", "number of orders of a choice's options over which probabilities are averaged, from 1"
    ),
    taken("normalise", "`sum`, `mean` or `pmi`"),
    taken("return_prompt_ids", "adds the token ids of the state, and of each question behind it"),
)
"""Fields of every endpoint that asks questions."""

INPUT_ITEM = FieldTable(
    "input[]",
    taken("type id status role content call_id name namespace arguments input output"),
    ignored("phase", allowed=("commentary", "final_answer")),
)
_PART = (*PART.rows, taken("data"), refused("logprobs"))
INPUT_PART = FieldTable("input[].content[]", *_PART, taken("refusal"))
QUESTION = FieldTable(
    "questions[]",
    taken("type name instructions"),
    taken("choices", elsewhere="Only questions of the type choice have choices."),
    taken("levels", elsewhere="Only questions of the type score have levels."),
)
INSTRUCTIONS_PART = FieldTable("questions[].instructions[]", *_PART)
CHOICE = FieldTable("questions[].choices[]", taken("value description"))
LEVEL = FieldTable("questions[].levels[]", taken("label description"))

DECISIONS = Endpoint(
    title="Decisions",
    path="/v1/decisions",
    shared=(REQUEST, ASKING),
    body=FieldTable(
        "",
        taken(
            "input",
            "the state: a text, or items of type message, function_call, custom_tool_call and their outputs."
            " Parts are text, refusals of an assistant, and `input_json`; no images",
        ),
        taken(
            "questions",
            "1 to 400: `predicate`; `choice` with 2 to 255 choices, whose values are texts or booleans;"
            " `score` with 2 to 10 levels. `instructions` are a text or parts as in `input`",
        ),
    ),
    inner=(
        INPUT_ITEM,
        INPUT_PART,
        QUESTION,
        INSTRUCTIONS_PART,
        CHOICE,
        LEVEL,
        STREAM_OPTIONS,
        PROMPT_CACHE_OPTIONS,
    ),
    required={
        "model": "default",
        "input": "x",
        "questions": [{"type": "predicate", "instructions": "x"}],
    },
)

INSTRUCTION = taken(
    "instruction", "the question about each document, in place of `Does the document answer the query?`"
)
UNCUT = (
    ignored("truncation truncate", "a document that does not fit is refused, never cut"),
    refused("truncate_prompt_tokens max_tokens_per_doc max_chunks_per_doc", "Send shorter documents."),
)
RERANK = Endpoint(
    title="Rerank",
    path="/v1/rerank",
    shared=(REQUEST, ASKING),
    body=FieldTable(
        "",
        taken("query", "a text, the state"),
        taken("documents", "at most 10,000 texts, or objects with the field `text`; a predicate each"),
        taken("rank_fields", "the fields of the objects in place of `text`, in this order"),
        taken("top_n", "number of results, the most relevant first; all if left out or 0"),
        taken("return_documents", "default true: each result repeats its document"),
        INSTRUCTION,
        *UNCUT,
    ),
    inner=(STREAM_OPTIONS, PROMPT_CACHE_OPTIONS),
    required={"model": "default", "query": "x", "documents": ["x"]},
)
SCORE = Endpoint(
    title="Score",
    path="/v1/score",
    shared=(REQUEST, ASKING),
    body=FieldTable(
        "",
        taken(
            "text_1 text_2",
            "texts or lists of texts: one query for all, or one for each text. Also named `queries` and"
            " `documents` or `items`, and `data_1` and `data_2`",
        ),
        taken("queries documents items data_1 data_2"),
        INSTRUCTION,
        *UNCUT,
    ),
    inner=(STREAM_OPTIONS, PROMPT_CACHE_OPTIONS),
    required={"model": "default", "text_1": "x", "text_2": "x"},
)
ENDPOINTS = (DECISIONS, RERANK, SCORE)
