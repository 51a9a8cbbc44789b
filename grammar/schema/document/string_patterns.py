"""Patterns of schemas, as expressions, and matched against strings by derivatives within a time limit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from functools import lru_cache

from ramify.errors import InvalidConstraint
from ramify.grammar.rules import regex_syntax
from ramify.grammar.rules.derivative import Derivatives, Residual
from ramify.grammar.rules.expression import nullable
from ramify.grammar.schema.document.check import place
from ramify.grammar.schema.document.unenforceable import Unenforceable

MAX_VALIDATION_S = 2.0
"""Most processor time of one validation, in seconds. References that overlap, or patterns with lookarounds,
can take exponential time."""
MAX_SECONDS = 0.5
"""Most time, in seconds, to match one string against a pattern that has lookarounds or backreferences."""
MAX_STEPS = 10_000
"""Most steps of a pattern's automaton that are cached."""
_CHECKED = 1024
"""Number of characters that are read by cached steps between two checks of the time limit."""


class TakesTooLong(InvalidConstraint):
    """Error: a validation, or the match of a pattern, took too long and was given up."""


class TimeLimit:
    """A limit of `seconds` of processor time of the calling thread. Since waiting for a processor does not
    count, a busy machine changes no result."""

    def __init__(
        self, seconds: float = MAX_VALIDATION_S, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def left(self, pointer: str) -> float:
        """The seconds that are left. If none are, raises `TakesTooLong` with `pointer`, that of a keyword."""
        left = self._end - self._clock()
        if left <= 0.0:
            raise TakesTooLong(
                f"Validating takes more than {self._seconds:g} s.",
                pointer=place(pointer) or None,
                remedy="Make the schema simpler: fewer options that overlap, no lookarounds in patterns.",
            )
        return left


class SearchPattern:
    """The strings in which a pattern matches somewhere, as an automaton whose steps are computed when they
    are needed."""

    def __init__(self, pattern: str) -> None:
        self.expression = regex_syntax.search(pattern)
        self._derivatives = Derivatives({})
        self.steps: dict[tuple[Residual, str], Residual] = {}

    def matches(self, string: str, left_s: Callable[[], float] | None = None) -> bool:
        """Whether the pattern matches somewhere in `string`. `left_s` is called from time to time, and may
        raise an error to end a match that takes too long."""
        left: Residual = frozenset([self.expression])
        for index, char in enumerate(string):
            if not left:
                return False
            after = self.steps.get((left, char))
            if left_s is not None and (after is None or index % _CHECKED == 0):
                left_s()
            if after is None:
                if len(self.steps) == MAX_STEPS:
                    self.steps.clear()
                after = self.steps[left, char] = self._step(left, ord(char))
            left = after
        return any(map(nullable, left))

    def _step(self, left: Residual, point: int) -> Residual:
        return frozenset(
            after
            for expression in left
            for ranges, after in self._derivatives.steps_of(expression)
            if any(low <= point <= high for low, high in ranges)
        )


@lru_cache(maxsize=512)
def _search_pattern(pattern: str) -> SearchPattern:
    return SearchPattern(pattern)


def search_pattern(pointer: str, pattern: str) -> SearchPattern:
    """The `SearchPattern` of `pattern`, from a cache.

    Raises `InvalidConstraint` with `pointer` if the pattern is not valid. Raises `Unenforceable` if the
    pattern is valid but has no automaton, for example because of a backreference.
    """
    try:
        return _search_pattern(pattern)
    except InvalidConstraint as error:
        # `regex_syntax` gives a remedy only if the pattern is valid but not supported.
        if error.remedy:
            raise Unenforceable(error.message, pointer=pointer, remedy=error.remedy) from None
        raise InvalidConstraint(
            error.message, pointer=pointer, remedy="Write the pattern in ECMA-262's syntax."
        ) from None


def without_lookaheads(pattern: str) -> list[tuple[str, bool]]:
    """Split `pattern` into patterns that a string must match (True) or must not match (False). Together they
    mean the same as `pattern`.

    ``^(?!a)b`` is ``[("^b", True), ("^(?:a)", False)]``: lookaheads directly after ^ become patterns of their
    own. If that is not possible, the result is `pattern` alone.
    """
    found: list[tuple[str, bool]] = []
    rest = pattern.removeprefix("^")
    while rest.startswith(("(?=", "(?!")):
        end = _group_end(rest)
        if end is None:
            return [(pattern, True)]
        found.append((f"^(?:{rest[3:end]})", rest[2] == "="))
        rest = rest[end + 1 :]
    if (
        not found
        or not pattern.startswith("^")
        or rest[:1] in ("*", "+", "?", "{")
        or _has_top_level_or(rest)
    ):
        return [(pattern, True)]
    return [(f"^{rest}", True), *found]


def _group_end(pattern: str) -> int | None:
    """The position of the parenthesis that closes the group with which `pattern` begins; None if the group is
    not closed."""
    for i, char, depth in _depths(pattern):
        if char == ")" and depth == 0:
            return i
    return None


def _has_top_level_or(pattern: str) -> bool:
    return any(char == "|" and depth == 0 for _, char, depth in _depths(pattern))


def _depths(pattern: str) -> Iterator[tuple[int, str, int]]:
    """(position, character, number of groups open after it) for each character of `pattern`, without escaped
    characters and those inside [sets]."""
    depth = 0
    in_set = escaped = False
    for i, char in enumerate(pattern):
        if escaped or in_set:
            in_set = in_set and (escaped or char != "]")
            escaped = not escaped and char == "\\"
            continue
        escaped = char == "\\"
        in_set = char == "["
        depth += (char == "(") - (char == ")")
        yield i, char, depth


def matches_regular(pointer: str, pattern: str, string: str, limit: TimeLimit | None = None) -> bool:
    """Whether `pattern` matches somewhere in `string`. Raises as `search_pattern` does if the pattern has no
    automaton, and `TakesTooLong`."""
    left_s = None if limit is None else functools.partial(limit.left, pointer)
    return search_pattern(pointer, pattern).matches(string, left_s)


def matches_pattern(pointer: str, pattern: str, text: str, limit: TimeLimit | None = None) -> bool:
    """Whether `pattern` matches somewhere in `text`.

    Raises `InvalidConstraint` with `pointer` if the pattern is not valid. Raises `TakesTooLong` if the limit
    is reached, or if the pattern has no automaton and takes longer than `MAX_SECONDS` to match.
    """
    try:
        return all(
            matches_regular(pointer, part, text, limit) == positive
            for part, positive in without_lookaheads(pattern)
        )
    except Unenforceable:
        return _backtracked(pointer, pattern, text, limit)


def _backtracked(pointer: str, pattern: str, text: str, limit: TimeLimit | None) -> bool:
    """Whether a pattern without an automaton matches. Uses backtracking, which may take exponential time."""
    import regex

    seconds = MAX_SECONDS if limit is None else min(MAX_SECONDS, limit.left(pointer))
    try:
        return regex.search(pattern, text, regex.ASCII, timeout=seconds) is not None
    except regex.error as error:
        raise InvalidConstraint(
            f"The pattern is not valid: {error}.", pointer=pointer, remedy="Write it in ECMA-262's syntax."
        ) from None
    except TimeoutError:
        raise TakesTooLong(
            f"The pattern takes longer than {seconds:.2g} s to match.",
            pointer=pointer,
            remedy="Leave out repetitions of repetitions, lookarounds and backreferences.",
        ) from None


def is_regex(text: str) -> bool:
    """Whether `text` is a regular expression to the `regex` package."""
    import regex

    try:
        regex.compile(text)
    except regex.error:
        return False
    return True
