"""The layout of rerankers that answer yes or no, such as Qwen3-Reranker.

They have the files of a CrossEncoder of sentence-transformers. `1_LogitScore/config.json` names the tokens
for yes and no. The chat template writes a message of the role "query" and one of the role "document". An
instruction is a message of the role "system".

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
NAME = "logit-score-1"

Render = Callable[[Sequence[Mapping[str, str]]], str]
"""Function from messages to the text that the chat template writes."""

INSTRUCTION, QUERY, DOCUMENT = "\U0010fffa", "\U0010fffb", "\U0010fffc"
"""Private-use characters that hold the places of the texts while the template renders them."""


@dataclass(frozen=True)
class LogitScoreConfig:
    """The tokens whose logits are compared."""

    yes: int
    no: int
    layout = NAME


def logit_score_config(content: Mapping[str, Any]) -> LogitScoreConfig:
    """The configuration in the JSON object `content`. Raises `InvalidRequest` if it does not name two tokens:
    the logit of one token alone is no probability."""
    yes, no = content.get("true_token_id"), content.get("false_token_id")
    if not (isinstance(yes, int) and isinstance(no, int)):
        raise InvalidRequest(
            f"{FILE} has the tokens {yes!r} for true and {no!r} for false; two ids are expected.",
            field="model",
        )
    return LogitScoreConfig(yes, no)


def logit_score_layout(config: LogitScoreConfig, render: Render) -> Layout:
    """The layout that the chat template of a reranker writes. Raises `InvalidRequest` unless the template
    writes the query, and then the document, once each."""
    pair = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}]
    text = render(pair)
    before, _, rest = text.partition(QUERY)
    between, _, after = rest.partition(DOCUMENT)
    if text != before + QUERY + between + DOCUMENT + after or rest.count(QUERY) or after.count(DOCUMENT):
        raise InvalidRequest(
            "The chat template of this reranker does not write a query and then a document.", field="model"
        )
    kept = between.rstrip()
    blanks = between[len(kept) :]

    def state(request: Generate) -> tuple[Segment, ...]:
        if request.chat is None:
            return (before, *request.prompt, kept)
        *system, query = request.chat
        if [turn.role for turn in system] not in ([], ["system"]):
            raise UnsupportedField(
                "This checkpoint is a reranker: its state is a query, not a conversation.", field="messages"
            )
        start = before
        for turn in system:
            start = render([{"role": "system", "content": INSTRUCTION}, *pair]).partition(QUERY)[0]
            if start.count(INSTRUCTION) != 1:
                raise UnsupportedField("This reranker's template takes no instruction.", field="messages")
            start = start.replace(INSTRUCTION, turn.content)
        return (start, query.content, kept)

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
