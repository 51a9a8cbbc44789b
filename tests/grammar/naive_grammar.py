"""The oracle of the pushdown tests: a grammar read by derivatives, all alternatives at once, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from ramify.grammar.rules.derivative import Derivatives
from ramify.grammar.rules.expression import NOTHING, Call, Chars, Expression, alt, chars, repeat, seq, text
from ramify.grammar.rules.rule_set import ROOT, productive
from ramify.grammar.vocabulary import Vocabulary


class NaiveGrammar:
    """`rules` must not begin with themselves."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._derivatives = Derivatives(productive(rules))
        self._after: dict[bytes, frozenset[Expression]] = {b"": frozenset([Call(ROOT)])}

    def allows(self, data: bytes) -> bool:
        """Whether some text of the grammar begins with `data`, which may end inside a character."""
        whole, part = _split(data)
        left = self._left(whole)
        if not part:
            return bool(left)
        low, high = _continuations(part)
        return any(
            first <= high and low <= last
            for expression in left
            for ranges, _ in self._derivatives.steps_of(expression)
            for first, last in ranges
        )

    def accepts(self, data: bytes) -> bool:
        whole, part = _split(data)
        return not part and any(map(self._derivatives.nullable, self._left(whole)))

    def _left(self, data: bytes) -> frozenset[Expression]:
        if data not in self._after:
            try:
                char = data.decode()[-1]
            except UnicodeDecodeError:
                return frozenset()
            before = data[: len(data) - len(char.encode())]
            self._after[data] = frozenset(
                after
                for expression in self._left(before)
                for ranges, after in self._derivatives.steps_of(expression)
                if after != NOTHING and any(low <= ord(char) <= high for low, high in ranges)
            )
        return self._after[data]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The whole characters of `data`, and the beginning of one at its end."""
    try:
        data.decode()
        return data, b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start], data[error.start :]
        return data, b""


def _continuations(part: bytes) -> tuple[int, int]:
    """The least and the greatest character whose UTF-8 begins with `part`."""
    ends = []
    for fill in (b"\x80\x90\xa0\xbf", b"\xbf\x9f\x8f\x80"):
        missing = (2 if part[0] < 0xE0 else 3 if part[0] < 0xF0 else 4) - len(part)
        found = []
        for byte in fill:
            for last in (b"\x80", b"\xbf"):
                try:
                    found.append(ord((part + bytes([byte]) + last * (missing - 1)).decode()))
                except UnicodeDecodeError:
                    continue
        ends += found
    return min(ends), max(ends)


LETTERS = "ab(),é日😀"
_LITERALS = st.sampled_from(["a", "b", "(", ")", ",", "ab", "aé", "日", "é)", "(("]).map(text)
_SETS = st.lists(st.sampled_from([*LETTERS]), min_size=1, max_size=4).map(
    lambda members: chars((ord(char), ord(char)) for char in members)
) | st.sampled_from([Chars(((0x61, 0x7A),)), Chars(((0x20, 0x21), (0x23, 0xD7FF), (0xE000, 0x10FFFF)))])
NAMES = [ROOT, "p", "q"]


def _expressions(names: list[str]) -> st.SearchStrategy[Expression]:
    # A call comes after a character: rules that begin with themselves are another matter.
    calls = st.sampled_from(names).flatmap(lambda name: _LITERALS.map(lambda before: seq(before, Call(name))))
    return st.recursive(
        _LITERALS | _SETS | calls,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: seq(*parts)),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: alt(*options)),
            st.tuples(inner, st.sampled_from([(0, None), (1, None), (0, 1), (1, 3), (2, 5)])).map(
                lambda pair: repeat(pair[0], *pair[1])
            ),
        ),
        max_leaves=8,
    )


def grammars() -> st.SearchStrategy[dict[str, Expression]]:
    """Rules that may call each other, and themselves after some character; perhaps none can end."""
    first = st.just(Call("p")) | st.just(Call("q")) | st.just(seq(Call("q"), Call("p")))
    return st.fixed_dictionaries(
        {ROOT: _expressions(NAMES) | first, "p": _expressions(NAMES), "q": _expressions(NAMES)}
    )


def vocabularies() -> st.SearchStrategy[Vocabulary]:
    """All bytes of `LETTERS`, and some longer tokens, also such that begin or end inside a character."""
    singles = sorted({bytes([byte]) for byte in "".join([LETTERS, "xyz"]).encode()})
    longer = st.text(LETTERS, min_size=1, max_size=5).flatmap(
        lambda string: st.tuples(st.integers(0, 2), st.integers(0, 2)).map(
            lambda cut: string.encode()[cut[0] : len(string.encode()) - cut[1]]
        )
    )
    return st.lists(longer, max_size=25).map(
        lambda tokens: Vocabulary((b"", *singles, *(token for token in tokens if token), b""), (0,))
    )
