"""Reasons for cache misses, found in the program's own requests.

A prompt is compared, as text, with the prompts and outputs of the program's earlier requests. The earlier
request with the longest common prefix is the nearest one:

    earlier   "Q: Who?" -> "Ada"         prompt and output
    prompt    "Q: Who?Bob"               shares 7 characters: diverges, "Bob" where the nearest has "Ada"
    prompt    "Q: Who?Ada. When?"        shares all 10: extends, new from "."

Prompts of other programs, which may be in the cache too, are not considered. The number of evicted tokens is
taken from the request's usage.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ramify.lang.prompt.transcript import Piece, pieces
from ramify.lang.trace.calls import Call

Reason = Literal["first", "extends", "diverges", "lost"]
"""The kind of reason for a miss. first: no earlier request to the same model shares a prefix. extends: the
prompt continues the nearest request's prompt and output. diverges: the prompt differs from the nearest
request's prompt and output. lost: the nearest request had computed tokens of the common prefix, but they were
not found in the cache."""

_SPECIAL = r"<[|｜]?/?[\w▁]+[|｜]?>"
"""Pattern of the special tokens of chat templates, such as <|im_end|>, <end_of_turn> and </s>."""
_WORD = re.compile(rf"{_SPECIAL}|\s?\w+|\s?(?:(?!{_SPECIAL})[^\w\s])+|\s+")
_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")
"""Pattern of a program's id, of which messages show only the first eight digits."""
MAX_TOKEN = 40


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason why `computed_tokens` of a prompt were computed."""

    reason: Reason
    computed_tokens: int
    nearest: Call | None = None
    shared_chars: int = 0
    token: str = ""
    """The first token of the prompt after the common prefix; in constant text, whose tokens are not known
    here, the first word."""
    token_id: int | None = None
    other: str = ""
    """The token or word of `nearest` in the same place; empty if `nearest` ends there."""
    other_id: int | None = None
    respelled: bool = False
    """Whether generated text was sent again as text, and not as token ids. The tokenizer may split text into
    other tokens."""
    overlapping: bool = False
    """Whether the prompt of the nearest request was still being computed when this request began."""
    evicted_tokens: int = 0
    """Number of the computed tokens that had been in the cache before and were evicted."""
    evicted_by: str = ""
    """The program whose requests caused most of these evictions."""

    def __str__(self) -> str:
        near = "" if self.nearest is None else f"{self.nearest.kind} {self.nearest.name!r}"
        token, other = _shown(self.token, self.token_id), _shown(self.other, self.other_id)
        taker = _ID.sub(r"\1", self.evicted_by)
        gone = f"{self.evicted_tokens} tokens of it had been evicted by {taker}"
        also = f" {gone}." if self.evicted_tokens else ""
        match self.reason:
            case "first":
                return f"No earlier request of this program begins like this one.{also}"
            case "extends":
                return f"New after all that {near} held; it begins with {token}.{also}"
            case "diverges":
                return f"Parts from {near}: {token} where that one has {other}.{also}"
        why = "evicted, or never kept; the runtime does not say"
        if self.evicted_tokens:
            why = gone
        elif self.respelled:
            why = "its generated text was sent again as text, and other tokens spell it"
        elif self.overlapping:
            why = "it was not computed yet when this request began"
        return f"{near.capitalize()} had computed more of this prompt than was found: {why}."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "nearest": None if self.nearest is None else self.nearest.name,
            "evicted_by": self.evicted_by or None,
            "text": str(self),
        }


@dataclass(frozen=True, slots=True)
class Cached:
    """The end of the cached part of a prompt, in characters."""

    chars: int
    exact: bool
    """Whether `chars` is exact. Otherwise `chars` is interpolated between two places with known token
    counts, and is the beginning of a word."""


class Misses:
    """The explanations for the requests below `root`. `why` maps requests to their misses; `cached` maps
    requests to the ends of the cached parts of their prompts."""

    def __init__(self, root: Call) -> None:
        self.why: dict[Call, Miss] = {}
        self.cached: dict[Call, Cached] = {}
        self._texts: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """Model → sorted list of (prompt and output, index into `_seen`), for the earlier requests to the
        model."""
        self._seen: list[Call] = []
        self._token_texts = token_texts(root)
        requests = [call for call in root.walk() if call.sent and call.prompt_end is not None]
        for call in sorted(requests, key=lambda call: call.start_s):
            self._explain(call)

    def _explain(self, call: Call) -> None:
        prompt = call.prompt
        nearest, shared = self._nearest(call.model, prompt)
        known = {0: 0} | self._known_end(call)
        if nearest is not None:
            known |= {place: tokens for place, tokens in self._known(nearest).items() if place <= shared}
        if call.end_s is not None and call.own_usage.prompt_tokens:
            cached = _place(known, call.own_usage.cached_tokens)
            if not cached.exact and (word := _word_at(prompt, cached.chars)) is not None:
                cached = replace(cached, chars=word.start())
            self.cached[call] = cached
            computed = call.own_usage.prompt_tokens - call.own_usage.cached_tokens
            if computed > 1:  # the last token is always computed: it gives the first output
                self.why[call] = self._miss(call, prompt, nearest, shared, computed, known)
        bisect.insort(self._texts[call.model], (prompt + call.output, len(self._seen)))
        self._seen.append(call)

    def _nearest(self, model: str, prompt: str) -> tuple[Call | None, int]:
        """The earlier request to `model` with the longest common prefix, and the length of that prefix;
        (None, 0) if no request has a common prefix. That request is a neighbour of `prompt` in the sorted
        list of texts."""
        texts = self._texts[model]
        at = bisect.bisect(texts, (prompt, len(self._seen)))
        found: tuple[int, int] = (0, -1)
        for text, index in texts[max(at - 1, 0) : at + 1]:
            found = max(found, (_common(prompt, text), index))
        shared, index = found
        return (self._seen[index], shared) if shared else (None, 0)

    def _known(self, call: Call) -> dict[int, int]:
        usage, length = call.own_usage, len(call.prompt)
        if not usage.prompt_tokens:
            return {}
        found = self._known_end(call)
        if call.tokens is not None:
            tokens, place = usage.prompt_tokens, length
            for count, chars in zip(call.tokens.counts, call.tokens.chars, strict=True):
                tokens, place = tokens + count, place + chars
                if chars:
                    found[place] = tokens
        return found

    def _known_end(self, call: Call) -> dict[int, int]:
        count = call.tokens_of_prompt
        return {} if count is None else {len(call.prompt): count}

    def _miss(
        self, call: Call, prompt: str, nearest: Call | None, shared: int, computed: int, known: dict[int, int]
    ) -> Miss:
        usage = call.own_usage
        miss = Miss(
            "first",
            computed,
            nearest,
            shared,
            *self._token(call, prompt, shared),
            evicted_tokens=usage.evicted_tokens,
            evicted_by=usage.evicted_by,
        )
        if nearest is None:
            return miss
        whole = nearest.prompt + nearest.output
        other, other_id = self._token(nearest, whole, shared)
        reason: Reason = "extends" if shared == len(whole) else "diverges"
        miss = replace(miss, reason=reason, other=other, other_id=other_id)
        # The last token of a prompt is computed again, and healing may take another one.
        expected = max(tokens for place, tokens in known.items() if place <= shared)
        if usage.cached_tokens >= min(expected, usage.prompt_tokens) - 2:
            return miss
        began = nearest.first_text_s if nearest.first_text_s is not None else nearest.end_s
        return replace(
            miss,
            reason="lost",
            respelled=_respelled(call, nearest, shared),
            overlapping=began is None or began > call.start_s,
        )

    def _token(self, call: Call, text: str, place: int) -> tuple[str, int | None]:
        """The token at `place` in the prompt and output of `call`, and the token's id. If the token is not
        known, the word at `place`, and None."""
        end = 0
        for token, part in self._parts(call):
            end += len(part)
            if end > place:
                return (_word(text, place), None) if token is None else (part, token)
        return _word(text, place), None

    def _parts(self, call: Call) -> Iterator[tuple[int | None, str]]:
        """The prompt and output of `call` in parts: (token id, text) for single tokens, and (None, text) for
        text whose tokens are not known."""
        for piece in pieces(call.prompt_end):
            ids = () if isinstance(piece.segment, str) else piece.segment
            texts = [self._token_texts[call.model].get(token, "") for token in ids]
            if ids and "".join(texts) == piece.text:
                yield from zip(ids, texts, strict=True)
            else:
                yield None, piece.text
        if call.tokens is not None:
            for span in call.tokens.spans(call.output, self._token_texts[call.model]):
                yield (span.ids[0] if len(span.ids) == 1 else None), span.text


def token_texts(root: Call) -> Mapping[str, dict[int, str]]:
    """Model → token id → text, for all tokens below `root` that arrived in a chunk of their own."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for call in root.walk():
        if call.tokens is not None:
            for span in call.tokens.spans(call.output, {}):
                if len(span.ids) == 1 and span.text:
                    found[call.model].setdefault(span.ids[0], span.text)
    return found


def _shown(token: str, token_id: int | None) -> str:
    return repr(token) if token_id is None else f"{token!r} (token {token_id})"


def _place(known: dict[int, int], tokens: int) -> Cached:
    """The place in the text at which the first `tokens` tokens end. `known` maps character positions to token
    counts."""
    before, after = (0, 0), None
    for chars, count in sorted(known.items()):
        if count <= tokens:
            before = (chars, count)
        else:
            after = (chars, count)
            break
    if before[1] == tokens or after is None:
        return Cached(before[0], exact=before[1] == tokens)
    share = (tokens - before[1]) / (after[1] - before[1])
    return Cached(round(before[0] + share * (after[0] - before[0])), exact=False)


def _common(one: str, other: str) -> int:
    """Length of the common prefix in characters, found by bisection, because comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _word(text: str, place: int) -> str:
    """The word around `place`; empty at the end of the text."""
    found = _word_at(text, place)
    return "" if found is None else found.group()[:MAX_TOKEN]


def _word_at(text: str, place: int) -> re.Match[str] | None:
    """Match of the word around `place`, with the space before the word, as tokenizers split text; None at the
    end of the text."""
    start = max(text.rfind(" ", 0, place), text.rfind("\n", 0, place), place - MAX_TOKEN, 0)
    return next((found for found in _WORD.finditer(text, start) if found.end() > place), None)


def _respelled(call: Call, nearest: Call, shared: int) -> bool:
    """Whether, within the first `shared` characters, `nearest` has token ids in a place where `call` has
    text."""
    theirs = _id_places(pieces(nearest.prompt_end))
    if nearest.output:
        theirs.add(len(nearest.prompt))
    ours = _id_places(pieces(call.prompt_end))
    return any(place < shared and place not in ours for place in theirs)


def _id_places(parts: list[Piece]) -> set[int]:
    places: set[int] = set()
    place = 0
    for part in parts:
        if not isinstance(part.segment, str):
            places.add(place)
        place += len(part.text)
    return places
