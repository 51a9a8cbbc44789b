"""The layout of a trained checkpoint, with the pieces of its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.decisions.decider import PLAIN, DeciderConfig, decider_layout
from ramify.decisions.layouts import Layout
from ramify.decisions.logit_score import LogitScoreConfig, logit_score_layout
from ramify.decisions.trained import Other, Trained
from ramify.errors import InvalidRequest
from ramify.runtime.model.tokenizer.chat_format import template_source
from ramify.runtime.processes.decision_tokens import PLACE

_UNCLOSED = {
    "<think>\n": "</think>\n\n",
    "<think>": "</think>\n\n",
    "<|channel>thought\n": "<channel|>",
}
"""Beginning of thoughts with which a template ends → end of thoughts, as decider-ai writes it."""


def trained_layout(found: Trained | None, tokenizer: Any) -> Layout | None:
    """The layout of the checkpoint `found`; None for None. `tokenizer` is a fast transformers tokenizer.

    Raises `InvalidRequest` if the chat template does not write what the checkpoint needs.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    match found:
        case None:
            return None
        case Other():
            return found.refusing
        case DeciderConfig():
            return decider_layout(found, encode, _user_turn(tokenizer) if found.chat else PLAIN)
        case LogitScoreConfig():
            return logit_score_layout(found, lambda messages: _rendered(tokenizer, messages))


def _user_turn(tokenizer: Any) -> tuple[str, str]:
    """The texts before and after the content of a user turn, up to an answer without thoughts."""
    source = template_source(tokenizer) if tokenizer.chat_template else ""
    switch = {"enable_thinking": False} if "enable_thinking" in source else {}
    text = _rendered(tokenizer, [{"role": "user", "content": PLACE}], add_generation_prompt=True, **switch)
    before, _, after = text.partition(PLACE)
    if text.count(PLACE) != 1:
        raise InvalidRequest("The chat template does not write a user turn exactly once.", field="model")
    end = next((end for start, end in _UNCLOSED.items() if after.endswith(start)), "")
    return before, after + end


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
    if not tokenizer.chat_template:
        raise InvalidRequest("This checkpoint needs a chat template, and has none.", field="model")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **variables))
    except Exception as error:  # a template is a program: it may raise anything
        raise InvalidRequest(
            f"The chat template refuses the checkpoint's turns: {error}", field="model"
        ) from error
