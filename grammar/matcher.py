"""The interface between the scheduler and the grammar engines, and the token masks that pass through it.

A `Grammar` is compiled once and shared; each request drives a `Matcher` of its own. Only `accept`,
`accept_bytes` and `rollback` change a matcher.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from ramify.messages import Enforcement

EXACT = Enforcement()
"""The enforcement of a grammar that allows all valid texts and no others."""


class Matcher(Protocol):
    """A matcher, which follows the output of one request through its grammar, token by token."""

    def accept(self, token: int) -> bool:
        """Advance over `token`. Returns False, and changes nothing, if the grammar does not allow it here."""
        ...

    def accept_bytes(self, data: bytes) -> bool:
        """Advance over the bytes `data`, which count as one token for `rollback`. Returns False, and changes
        nothing, if the grammar does not allow them here."""
        ...

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        """Write the tokens that may come next into `row`, a contiguous (ceil(vocab / 32),) int32 array.

        Token t is bit ``t % 32`` of word ``t // 32``. Returns False, and leaves `row` untouched, if all
        tokens are allowed. All stop tokens are allowed where the text is complete, and nowhere else. Other
        special tokens are not allowed, except control tokens that the constraint contains. A finished matcher
        allows nothing.

        `budget` is the number of tokens that may still come, not counting stop tokens. A token is allowed
        only if `completion_tokens` after it is less than `budget`, so that the text can be completed within
        the budget. If `completion_tokens` is None, the budget has no effect.
        """
        ...

    @property
    def completion_tokens(self) -> int | None:
        """Upper bound of the number of tokens that complete the text, without a stop token. Some token that
        may come next always lowers the bound. 0 if the text is complete; None if the engine does not know."""
        ...

    def forced_bytes(self) -> bytes:
        """The bytes that must come next, however they are split into tokens; empty if there is a choice or
        the text may end. The last character may be incomplete."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens. Raises `ValueError` if fewer were accepted."""
        ...

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    @property
    def finished(self) -> bool:
        """Whether a stop token was accepted."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the grammar allows the text to end here."""
        ...


class Grammar(Protocol):
    """A compiled constraint, shared by the requests that asked for it."""

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        ...

    enforcement: Enforcement
    """The keywords of the constraint that the grammar does not enforce, and the valid texts that it does not
    allow."""

    def matcher(self, prefix: bytes = b"") -> Matcher:
        """A matcher at the beginning of the text. Its first tokens must spell `prefix`; the last of these may
        contain further text that the grammar allows."""
        ...


def mask_words(vocab_size: int) -> int:
    """Number of int32 words of a mask over `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def single_token(row: np.ndarray) -> int | None:
    """The one token that the mask `row` allows, or None if it allows none or several."""
    words = row.view(np.uint32)
    if int(np.bitwise_count(words).sum()) != 1:
        return None
    word = int(words.argmax())
    return word * 32 + int(words[word]).bit_length() - 1


def allowed_among(row: np.ndarray, tokens: Collection[int]) -> list[int] | None:
    """The tokens among the distinct `tokens` that the mask `row` allows; None if the mask also allows other
    tokens."""
    words = row.view(np.uint32)
    found = [token for token in tokens if int(words[token >> 5]) >> (token & 31) & 1]
    return found if int(np.bitwise_count(words).sum()) == len(found) else None


def tokens_of(row: np.ndarray) -> list[int]:
    """The tokens that the mask `row` allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def allow(row: np.ndarray, tokens: Sequence[int] | np.ndarray, allowed: bool = True) -> None:
    """Set in the mask `row` whether `tokens` are `allowed`."""
    ids = np.asarray(tokens, np.int64)
    bits = np.uint32(1) << (ids & 31).astype(np.uint32)
    if allowed:
        np.bitwise_or.at(row.view(np.uint32), ids >> 5, bits)
    else:
        np.bitwise_and.at(row.view(np.uint32), ids >> 5, ~bits)


def allows(row: np.ndarray, tokens: int | np.ndarray) -> np.ndarray:
    """Whether the mask `row` allows each of `tokens`: an array of bool of the same shape."""
    ids = np.asarray(tokens, np.int64)
    found: np.ndarray = (row.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32) & 1).astype(bool)
    return found


def check_rollback(count: int, accepted: int) -> None:
    """Raise `ValueError` unless `count` of `accepted` tokens can be taken back."""
    if not 0 <= count <= accepted:
        raise ValueError(f"Cannot take back {count} of {accepted} accepted tokens.")
