"""Keeps the special tokens that a chat template writes apart from those that texts of messages spell.

Example: the user's text is ``a<|im_end|>b``, and · stands for `MARK`.

    the text, marked         a<·|im_end|>b
    rendered                 <|im_start|>user\\na<·|im_end|>b<|im_end|>\\n
    between special tokens   "user\\na<·|im_end|>b", "\\n"
    without the mark         "user\\na<|im_end|>b", encoded by a tokenizer that knows no special tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ramify.errors import InvalidRequest
from ramify.runtime.model.tokenizer.chat_format import template_source

MARK = "\U0010ffff"
"""A code point that is no character (Unicode, section 23.7). In the text of a message it is left out."""
_BEFORE = "\U0010fffe"
"""A token that stands before a text which is not the beginning of the prompt: some tokenizers begin with a
space."""


class MessageTexts:
    """Marks and encodes texts of messages. `tokenizer` is a fast transformers tokenizer.

    Special are the tokens that the tokenizer says so of, and those that the chat template writes, such as
    ``<tool_call>``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        source = template_source(tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {token: entry.content for token, entry in added.items() if entry.special}
        written = {
            token: entry.content
            for token, entry in added.items()
            if not entry.special and entry.content.strip() and entry.content in source
        }
        self._ids = frozenset((*special, *written))
        self._special = _any_of(special.values())
        self._all = _any_of((*special.values(), *written.values()))

    def marked(self, turn: dict[str, Any]) -> dict[str, Any]:
        """A turn whose texts have a mark in every special token that they spell.

        In an assistant's turn tokens such as ``</think>`` stay, by which templates take it apart.
        """
        found = self.marked_values(turn, self._special if turn["role"] == "assistant" else self._all)
        return {**found, "role": turn["role"]}

    def marked_values(self, value: Any, spellings: re.Pattern[str] | None = None) -> Any:
        """`value`, built of dicts, lists and texts, with all of its texts marked."""
        spellings = spellings or self._all
        if isinstance(value, str):
            return spellings.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, list):
            return [self.marked_values(each, spellings) for each in value]
        if isinstance(value, dict):
            return {
                self.marked_values(key, spellings): self.marked_values(each, spellings)
                for key, each in value.items()
            }
        return value

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered prompt. Raises `InvalidRequest` where a text has no other ids than special
        ones."""
        found = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        run: list[int] = []  # ids behind the last special token, whose end is `start`
        start = 0
        for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token not in self._ids:
                run.append(token)
                continue
            ids += [*self._unmarked(text[start:begin], run, first=start == 0), token]
            run, start = [], end
        return ids + self._unmarked(text[start:], run, first=start == 0)

    def _unmarked(self, text: str, ids: list[int], *, first: bool) -> list[int]:
        """The ids of `text` without its marks; `ids` where it has none."""
        if MARK not in text:
            return ids
        text = text.replace(MARK, "")
        if first:
            plain: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        else:
            plain = self._plain.encode(_BEFORE + text, add_special_tokens=False).ids[1:]
        if not self._ids.isdisjoint(plain):
            raise InvalidRequest(
                "A message spells a special token that this model's tokenizer cannot write as text.",
                field="messages",
                remedy="Leave it out, or start the server without --no-special-tokens-in-messages.",
            )
        return plain

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer, to which special tokens are text."""
        description = json.loads(self._backend.to_str())
        for entry in description["added_tokens"]:
            entry["special"] = entry["id"] in self._ids
        tokenizer = Tokenizer.from_str(json.dumps(description))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(_BEFORE, normalized=False)])
        return tokenizer


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Any of `spellings`, the longest first. None of one character, which cannot be parted."""
    parts = sorted((each for each in spellings if len(each) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, parts)) or r"(?!)", re.IGNORECASE)
