"""Distinguishes special tokens that a chat template writes from their spellings in the texts of messages.

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
"""A code point that is no character (Unicode, section 23.7). It is removed from the texts of messages."""
_BEFORE = "\U0010fffe"
"""Text of a token that is put before a text that does not begin the prompt, since some tokenizers add a space
at the beginning of a text."""


class MessageTexts:
    """Marks and encodes the texts of messages. `tokenizer` is a fast transformers tokenizer.

    Tokens count as special if the tokenizer says so, or if the chat template writes them, such as
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
        """`turn` with a mark in every special token that its texts spell.

        In an assistant's turn, tokens that only the template makes special, such as ``</think>``, are left as
        they are, since templates split the turn at them.
        """
        found = self.marked_values(turn, self._special if turn["role"] == "assistant" else self._all)
        return {**found, "role": turn["role"]}

    def marked_values(self, value: Any, spellings: re.Pattern[str] | None = None) -> Any:
        """`value`, built of dicts, lists and texts, with a mark in each of the `spellings` (None: all special
        tokens) in its texts."""
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
        """The ids of a rendered prompt. Raises `InvalidRequest` if a marked spelling can only be encoded as
        the special token."""
        found = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        run: list[int] = []  # ids after the last special token, which ends at `start`
        start = 0
        for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token not in self._ids:
                run.append(token)
                continue
            ids += [*self._unmarked(text[start:begin], run, first=start == 0), token]
            run, start = [], end
        return ids + self._unmarked(text[start:], run, first=start == 0)

    def _unmarked(self, text: str, ids: list[int], *, first: bool) -> list[int]:
        """The ids of `text` without its marks; `ids` if it has none. `first`: the text begins the prompt."""
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
        """A copy of the tokenizer that encodes the spellings of special tokens as ordinary text."""
        description = json.loads(self._backend.to_str())
        for entry in description["added_tokens"]:
            entry["special"] = entry["id"] in self._ids
        tokenizer = Tokenizer.from_str(json.dumps(description))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(_BEFORE, normalized=False)])
        return tokenizer


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `spellings`, the longest first. Spellings of one character are left out,
    since no mark can be put inside them."""
    parts = sorted((each for each in spellings if len(each) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, parts)) or r"(?!)", re.IGNORECASE)
