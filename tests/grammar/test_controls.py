"""Control tokens in grammars: where they come, and that their stand-ins remain text elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.constraint import with_controls as standing
from ramify.engine_messages import CompileGrammar, GrammarReady
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.engine.controls import with_controls
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.matcher import Matcher, mask_words, tokens_of
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary
from ramify.tool_calls.formats import HARMONY
from ramify.tool_calls.grammar import FREE, Tool, calls_or_answer
from tests.model.harmony import SPECIAL, write_harmony_tokenizer

RETURN = 256
ID = {name: RETURN + index for index, name in enumerate(SPECIAL)}
TEXT = '{"type":"object","properties":{"q":{"type":"string"}},"required":["q"]}'
TOOLS = [
    Tool(name="find", parameters=TEXT),
    Tool(name="wait", parameters='{"type":"object","properties":{}}'),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder: Path = tmp_path_factory.mktemp("harmony")
    write_harmony_tokenizer(folder)
    return load_vocabulary(folder, vocab_size=320, stop_ids=[RETURN, ID["<|call|>"]])


@pytest.fixture
def matcher(vocabulary: Vocabulary) -> Matcher:
    return matcher_of(vocabulary, content=FREE, words=True)


def matcher_of(vocabulary: Vocabulary, *, content: dict[str, Any] | None, words: bool) -> Matcher:
    constraint = calls_or_answer(HARMONY, TOOLS, thought=True, content=content, words=words)
    done = answer(CompileGrammar(key="k", constraint=constraint), vocabulary)
    assert isinstance(done, GrammarReady)
    grammar = load_grammar(done.engine, done.payload, done.enforcement, vocabulary)
    return with_controls(grammar.matcher(), vocabulary)


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(mask_words(320), np.int32)
    return set(tokens_of(row)) if matcher.fill_mask(row, 500) else set(range(256))


def advance(matcher: Matcher, vocabulary: Vocabulary, *parts: str) -> None:
    """Take each part token by token; a mask must allow each."""
    spelled = {spelling: token for token, spelling in enumerate(vocabulary.tokens) if spelling}
    for part in parts:
        tokens = [ID[part]] if part in ID else [spelled[bytes([byte])] for byte in part.encode()]
        for token in tokens:
            found = allowed(matcher)
            assert token in found
            assert matcher.accept(token)


def test_a_call_after_thoughts(matcher: Matcher, vocabulary: Vocabulary) -> None:
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>", "commentary to=functions.find ")
    advance(matcher, vocabulary, "<|constrain|>", "json", "<|message|>", '{"q": "')
    # The private character is text here.
    advance(matcher, vocabulary, standing("<|start|>"))
    assert not set(ID.values()) & allowed(matcher)
    advance(matcher, vocabulary, '"}')
    assert matcher.complete
    assert allowed(matcher) == {RETURN, ID["<|call|>"]}
    matcher.rollback(2)
    advance(matcher, vocabulary, 'x"}')


def test_the_final_channel_is_free(matcher: Matcher, vocabulary: Vocabulary) -> None:
    twin = matcher.fork()
    advance(
        matcher, vocabulary, "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Any <|text|>"
    )
    assert matcher.complete
    assert matcher.forced_bytes() == b""
    assert allowed(twin) == {ID["<|start|>"]}, "a fork is on its own"
    assert twin.forced_bytes() == b""


def test_no_other_channel_and_no_other_tool(matcher: Matcher, vocabulary: Vocabulary) -> None:
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>")
    first = {vocabulary.tokens[token] for token in allowed(matcher)}
    assert first == {b"c", b"f"}
    advance(matcher, vocabulary, "commentary to=functions.")
    assert {vocabulary.tokens[token] for token in allowed(matcher)} == {b"f", b"w"}


@pytest.mark.parametrize(
    "between",
    [
        ["<|channel|>", "commentary json", "<|message|>"],
        ["<|channel|>", "commentary ", "<|constrain|>", "json", "<|message|>"],
    ],
)
def test_the_recipient_may_come_first(matcher: Matcher, vocabulary: Vocabulary, between: list[str]) -> None:
    advance(matcher, vocabulary, "<|start|>", "assistant")
    assert allowed(matcher) == {ID["<|channel|>"], vocabulary.tokens.index(b" ")}
    advance(matcher, vocabulary, " to=functions.find", *between, '{"q": "a"}')
    assert matcher.complete


def test_words_may_come_before_a_call(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """Text and the control token that ends it may both come: text is not mistaken for it, nor are others."""
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>", "commentary")
    assert allowed(matcher) == {ID["<|message|>"], vocabulary.tokens.index(b" ")}
    advance(matcher, vocabulary, "<|message|>", "I look <|end|>")
    found = allowed(matcher)
    assert {ID["<|end|>"]} == found & set(ID.values())
    assert not any(b"\xf4" in vocabulary.tokens[token] for token in found)
    assert len(found) > 150
    assert not matcher.complete
    advance(matcher, vocabulary, "<|end|>")
    assert allowed(matcher) == {ID["<|start|>"]}
    twin = matcher.fork()
    advance(twin, vocabulary, "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "No.")
    assert twin.complete
    advance(
        matcher, vocabulary, "<|start|>", "assistant", " to=functions.wait", "<|channel|>", "commentary json"
    )
    advance(matcher, vocabulary, "<|message|>", "{}")
    assert matcher.complete


def test_words_before_a_call_end_in_time(matcher: Matcher, vocabulary: Vocabulary) -> None:
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>", "commentary", "<|message|>", "Hm")
    row = np.zeros(mask_words(320), np.int32)
    while not matcher.complete:
        assert matcher.fill_mask(row, matcher.completion_tokens)
        assert matcher.accept(tokens_of(row)[0])


def test_words_before_a_format_lead_to_a_call(vocabulary: Vocabulary) -> None:
    """Content of a format would not be alone after them."""
    digits = {"type": "regex", "pattern": "[0-9]+"}
    matcher = matcher_of(vocabulary, content=digits, words=True)
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>")
    twin = matcher.fork()
    advance(twin, vocabulary, "final", "<|message|>", "12")
    assert twin.complete
    advance(matcher, vocabulary, "commentary", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant")
    advance(matcher, vocabulary, "<|channel|>", "commentary")
    assert b"f" not in {vocabulary.tokens[token] for token in allowed(matcher)}


def test_a_call_that_is_required_comes_at_once(vocabulary: Vocabulary) -> None:
    matcher = matcher_of(vocabulary, content=None, words=False)
    advance(matcher, vocabulary, "<|start|>", "assistant", "<|channel|>", "commentary")
    assert {vocabulary.tokens[token] for token in allowed(matcher)} == {b" "}


def test_without_such_tokens_nothing_is_wrapped() -> None:
    plain = Vocabulary((b"a", b""), (1,))
    inner: Matcher = object()  # type: ignore[assignment]
    assert with_controls(inner, plain) is inner
