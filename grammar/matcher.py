"""The interface between the scheduler and the grammar engines.

A `Grammar` is compiled once and shared; each request drives a `Matcher` of its own. A matcher's state
is changed by `accept` and `rollback` alone.
"""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import numpy as np

from ramify.messages import Unenforced


class Matcher(Protocol):
    """Follows the output of one request through its grammar, token by token."""

    def accept(self, token: int) -> bool:
        """Advance over `token`. False, and nothing changed, if the grammar does not allow it here."""
        ...

    def accept_bytes(self, data: bytes) -> bool:
        """Advance over text, which counts as one token for `rollback`. False, and nothing changed, if
        the grammar does not allow it here."""
        ...

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        """Write which tokens may come next into `row`, a contiguous (ceil(vocab / 32),) int32 array.

        Token t is bit ``t % 32`` of word ``t // 32``. False, and `row` untouched, if all tokens are
        allowed. Stop tokens are allowed, all of them, where the text is complete and only there; other
        special tokens never. A finished matcher allows nothing.

        With a `budget`, the number of tokens that may still come, only those are allowed after which
        `completion_tokens` is less: the text can be completed in time. Stop tokens are not counted.
        Where `completion_tokens` is None the budget is disregarded.
        """
        ...

    @property
    def completion_tokens(self) -> int | None:
        """Tokens that suffice to complete the text, without a stop token: those of `completion`. 0 if it
        is complete; None if the engine cannot say."""
        ...

    def completion(self) -> list[int] | None:
        """Tokens that complete the text, short ones: each lets `completion_tokens` shrink by one at
        least. None if the engine cannot say."""
        ...

    def forced_bytes(self) -> bytes:
        """Bytes that must come next, whatever their tokens; empty where there is a choice or an end. A
        character may be cut at the end."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens. Raises ValueError if there are not so many."""
        ...

    def fork(self) -> Matcher:
        """A matcher in the same state that goes its own way from here."""
        ...

    @property
    def finished(self) -> bool:
        """A stop token was accepted."""
        ...

    @property
    def complete(self) -> bool:
        """The text so far is a whole sentence of the grammar: it may stop here."""
        ...

    @property
    def free(self) -> bool:
        """Text of any kind may come here, without end: where the tokens run out it is cut, not complete."""
        ...


class Grammar(Protocol):
    """A compiled constraint, shared by the requests that asked for it."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds, in bytes; approximate."""
        ...

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """What the constraint says and the grammar leaves out."""
        ...

    def matcher(self, prefix: bytes = b"") -> Matcher:
        """A matcher at the beginning of the text. Its first tokens must spell `prefix`: a token may spell
        some of it, or all of it and then what the grammar allows."""
        ...


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask over `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def single_token(row: np.ndarray) -> int | None:
    """The one token that the mask `row` allows, or None if it allows none or several."""
    words = row.view(np.uint32)
    if int(np.bitwise_count(words).sum()) != 1:
        return None
    word = int(words.argmax())
    return word * 32 + int(words[word]).bit_length() - 1


def first_token(row: np.ndarray) -> int:
    """The lowest token that the mask `row` allows; it allows one."""
    word = int(np.flatnonzero(row)[0])
    bits = int(row.view(np.uint32)[word])
    return word * 32 + (bits & -bits).bit_length() - 1


def check_rollback(count: int, accepted: int) -> None:
    """Raise `ValueError` where `count` of `accepted` tokens cannot be taken back."""
    if not 0 <= count <= accepted:
        raise ValueError(f"Cannot take back {count} of {accepted} accepted tokens.")


class Step(Protocol):
    """Where a matcher stands after a token, with the step before it: forks share what they have in common."""

    @property
    def before(self) -> Self | None: ...
    @property
    def accepted(self) -> int: ...


S = TypeVar("S", bound=Step)


def taken_back(step: S, count: int) -> S:
    """The step `count` tokens before `step`. Raises `ValueError` where there are not so many."""
    check_rollback(count, step.accepted)
    for _ in range(count):
        before = step.before
        assert before is not None
        step = before
    return step
