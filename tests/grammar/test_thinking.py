"""Free text up to its end, then the constraint: masks, forcing, budgets, rollback."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import constraint
from ramify.grammar.engine.thinking import FreeGrammar, with_preambles
from ramify.grammar.matcher import Matcher
from ramify.messages import Preamble
from tests.grammar.vocabularies import (
    CONTROL,
    STOP,
    compiled,
    completion_of,
    mask_of,
    taken_back,
    tiny,
    tiny_tokenizer,
    tokenise,
)

END = "</think>"
DIGITS = compiled(constraint.regex(r"[0-9]{3}"))
THINKING = Preamble(end=END)


def matcher_of(*preambles: Preamble, grammar: Any = DIGITS) -> Matcher:
    known = [
        Preamble(
            end=one.end,
            max_tokens=one.max_tokens,
            optional=one.optional,
            end_ids=(CONTROL,) if one.end == "<control>" else tuple(tiny_tokenizer().encode(one.end).ids),
        )
        for one in preambles
    ]
    return with_preambles(grammar.matcher(), known, tiny())


def mask(matcher: Matcher, budget: int | None = None) -> np.ndarray:
    return mask_of(matcher, tiny(), budget)


def feed(matcher: Matcher, text: str) -> bool:
    return all(matcher.accept(token) for token in tokenise(text, tiny()))


@pytest.mark.parametrize(
    "thought", ["", "well, </thin", "<<</think", "a</think", "日本 </ </think", "x" * 50]
)
def test_text_up_to_the_end_then_the_answer(thought: str) -> None:
    matcher = matcher_of(THINKING)
    assert feed(matcher, thought)
    assert not matcher.complete
    assert not mask(matcher)[STOP]
    rest = END if not thought.endswith("</think") else ">"
    assert feed(matcher, rest)
    assert not feed(matcher.fork(), "a")
    assert feed(matcher, "123")
    assert matcher.complete
    assert np.flatnonzero(mask(matcher)).tolist() == [STOP]
    assert matcher.accept(STOP)
    assert matcher.finished


def test_tokens_that_run_past_the_end_go_on_with_the_answer() -> None:
    """A token that ends the preamble and goes on is allowed only if the answer may begin with the rest."""
    grammar = compiled(constraint.regex(r"(: |\},)[0-9]+"))
    matcher = matcher_of(Preamble(end='"'), grammar=grammar)
    allowed = mask(matcher)
    fitting = {}
    for token, spelling in enumerate(tiny().tokens):
        _, found, rest = spelling.partition(b'"')
        if found and rest:
            fitting[spelling] = takes(grammar, rest)
            assert bool(allowed[token]) == fitting[spelling]
            assert matcher.fork().accept(token) == fitting[spelling]
    assert fitting[b'":']
    assert fitting[b'"}']
    assert not fitting[b'",']
    assert not fitting[b' "\\']
    assert feed(matcher, '":')
    assert feed(matcher, " 1")


def takes(grammar: Any, data: bytes) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(token) for token in tokenise(data, tiny()))


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_spent_limit_forces_the_end(limit: int) -> None:
    matcher = matcher_of(Preamble(end=END, max_tokens=limit))
    for _ in range(limit):
        assert matcher.forced_bytes() == b""
        assert matcher.accept(tokenise("a", tiny())[0])
    assert matcher.forced_bytes() == END.encode()
    tokens = []
    for _ in tiny_tokenizer().encode(END).ids:
        (token,) = np.flatnonzero(mask(matcher))
        assert matcher.accept(int(token))
        tokens.append(int(token))
    assert tokens == tiny_tokenizer().encode(END).ids, "as the tokenizer spells it"
    assert feed(matcher, "123")


def test_a_forced_end_goes_on_from_where_the_text_stands() -> None:
    matcher = matcher_of(Preamble(end=END, max_tokens=3))
    assert feed(matcher, "a</")
    assert matcher.forced_bytes() == b"think>"
    assert not feed(matcher.fork(), "</think>")
    assert feed(matcher, "think>1")


def test_every_spelling_of_a_forced_end_is_accepted() -> None:
    matcher = matcher_of(Preamble(end=END, max_tokens=0))
    single = [tiny().tokens.index(bytes([byte])) for byte in END.encode()]
    assert all(map(matcher.accept, single))
    assert feed(matcher, "123")


@pytest.mark.parametrize("optional", [False, True])
def test_a_control_token_as_the_end(optional: bool) -> None:
    matcher = matcher_of(Preamble(end="<control>", optional=optional))
    assert mask(matcher)[CONTROL]
    assert feed(matcher, "some <control")
    assert feed(matcher.fork(), ">123"), "spelled out it is the end as well: readers go by the text"
    assert mask(matcher)[CONTROL]
    assert mask(matcher)[STOP] == optional == matcher.complete
    assert matcher.accept(CONTROL)
    assert not matcher.complete
    assert feed(matcher, "123")
    forced = matcher_of(Preamble(end="<control>", max_tokens=0))
    assert np.flatnonzero(mask(forced)).tolist() == [CONTROL]
    assert forced.forced_bytes() == b"", "no text spells it"


def test_optional_text_may_stay_alone() -> None:
    matcher = matcher_of(Preamble(end=END, optional=True))
    assert feed(matcher, "just text </thin")
    assert matcher.complete
    assert matcher.completion_tokens == 0
    assert matcher.accept(STOP)
    assert matcher.finished
    assert not mask(matcher).any()
    matcher.rollback(1)
    assert feed(matcher, "k>")
    assert not matcher.accept(STOP)
    assert feed(matcher, "123")


def test_the_shortest_way_to_the_end() -> None:
    matcher = matcher_of(THINKING)
    for begun in ("", "hm", "a</", "</think", "</thin"):
        twin = matcher.fork()
        assert feed(twin, begun)
        way = completion_of(twin, tiny())
        assert len(way) == twin.completion_tokens
        assert all(map(twin.accept, way))
        assert twin.complete
        assert completion_of(twin, tiny()) == []
    assert completion_of(matcher_of(Preamble(end=END, optional=True)), tiny()) == []


def test_text_counts_as_one_token() -> None:
    matcher = matcher_of(THINKING)
    assert matcher.accept_bytes(b"hm </thi")
    assert not matcher.accept_bytes(b"nk>x")
    assert matcher.accept_bytes(b"nk>12")
    assert matcher.accept_bytes(b"3")
    assert matcher.complete
    matcher.rollback(2)
    assert feed(matcher, "s </think>1")
    forced = matcher_of(Preamble(end=END, max_tokens=0))
    assert not forced.accept_bytes(b"x")
    assert forced.accept_bytes(b"</think>1")


def test_thinking_without_a_constraint() -> None:
    matcher = matcher_of(THINKING, grammar=FreeGrammar(tiny()))
    assert not matcher.accept(STOP)
    assert feed(matcher, "hm</think>anything</think>")
    assert mask(matcher).all()
    assert matcher.accept(STOP)
    assert matcher.finished


def test_two_preambles() -> None:
    matcher = matcher_of(THINKING, Preamble(end="<call>", optional=True))
    assert not matcher.complete
    assert feed(matcher, "hm <call> </think>")
    assert matcher.complete
    assert feed(matcher, " text <call>")
    assert not matcher.complete
    assert feed(matcher, "123")
    assert matcher.complete


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(3, 30), limit=st.none() | st.integers(0, 20))
def test_the_budget_is_kept(seed: int, budget: int, limit: int | None) -> None:
    """Random tokens of the mask: the answer is complete when the budget is spent."""
    matcher = matcher_of(Preamble(end=END, max_tokens=limit))
    needed = len(tiny_tokenizer().encode(END).ids) + (DIGITS.matcher().completion_tokens or 0)
    assert matcher.completion_tokens == needed
    budget += needed
    chooser = random.Random(seed)
    while budget and not matcher.finished:
        allowed = np.flatnonzero(mask(matcher, budget))
        token = int(chooser.choice(allowed))
        assert matcher.accept(token)
        budget -= 1
    assert matcher.complete or matcher.finished


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), optional=st.booleans(), limit=st.none() | st.integers(0, 9))
def test_rollback_fork_and_mask(seed: int, optional: bool, limit: int | None) -> None:
    preamble = Preamble(end='"', max_tokens=limit, optional=optional)
    fresh = taken_back(lambda: matcher_of(preamble), random.Random(seed))
    allowed, forced = mask(fresh), fresh.forced_bytes()
    for token in range(tiny().size):
        taken = fresh.fork().accept(token)
        assert taken if allowed[token] else (not taken or forced)
