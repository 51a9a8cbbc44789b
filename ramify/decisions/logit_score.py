"""The layout of rerankers that answer yes or no, such as Qwen3-Reranker.

They have the files of a CrossEncoder of sentence-transformers. `1_LogitScore/config.json` names the tokens
for yes and no. The chat template writes a message of the role "query" and one of the role "document".

    state    <|im_start|>system … <Instruct>: … <Query>: capital of China\\n<Document>:
    form     " Beijing is the capital.<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"
    paths    yes, no

The state is the query, and the instructions of a predicate are a document. Blanks before the document belong
to the form: tokenizers split texts before the blank that precedes a word, so the ids are those of the whole
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.decisions.layouts import Form, Layout, Spelling
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate, Segment
from ramify.questions import Question

FILE = "1_LogitScore/config.json"

Render = Callable[[Sequence[Mapping[str, str]]], str]
"""Function from messages to the text that the chat template writes."""

QUERY, DOCUMENT = "\U0010fffb", "\U0010fffc"
"""Private-use characters that hold the places of the texts while the template renders them."""


@dataclass(frozen=True)
class LogitScoreConfig:
    """The tokens whose logits are compared."""

    yes: int
    no: int
    layout = "logit-score-1"


def logit_score_config(content: Mapping[str, Any]) -> LogitScoreConfig:
    """The configuration in the JSON object `content`. Raises `InvalidRequest` if it does not name two tokens:
    the logit of one token alone is no probability."""
    ids = [content.get(name) for name in ("true_token_id", "false_token_id")]
    if not all(isinstance(token, int) for token in ids):
        raise InvalidRequest(
            f"{FILE} has the tokens {ids[0]!r} for true and {ids[1]!r} for false; two ids are expected.",
            field="model",
        )
    return LogitScoreConfig(*ids)


def logit_score_layout(config: LogitScoreConfig, render: Render) -> Layout:
    """The layout that the chat template of a reranker writes. Raises `InvalidRequest` unless the template
    writes the query, and then the document, once each."""
    text = render([{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}])
    before, found_query, rest = text.partition(QUERY)
    between, found_document, after = rest.partition(DOCUMENT)
    if not (found_query and found_document) or any(mark in after for mark in (QUERY, DOCUMENT)):
        raise InvalidRequest(
            "The chat template of this reranker does not write a query and then a document.", field="model"
        )
    kept = between.rstrip()
    blanks = between[len(kept) :]

    def state(request: Generate) -> tuple[Segment, ...]:
        if request.chat is not None and len(request.chat) > 1:
            raise UnsupportedField(
                "This checkpoint is a reranker: its state is a query, not a conversation.", field="messages"
            )
        query = request.prompt if request.chat is None else (request.chat[0].content,)
        return (before, *query, kept)

    def forms(question: Question, permutations: int) -> list[Form]:
        if question.kind != "predicate" or any(option.description for option in question.options):
            raise UnsupportedField(
                "This checkpoint is a reranker: it is asked predicates without descriptions.",
                field="decide.questions",
                remedy="Name the layout verbatim, labels or isolated to ask it as a plain language model.",
            )
        spellings = (Spelling(0, (config.yes,)), Spelling(1, (config.no,)))
        return [Form((blanks + question.instructions + after,), spellings)]

    return Layout(config.layout, forms, state)
