"""Control tokens in grammars: where they come, and that their stand-ins remain text elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ramify.constraint import with_controls as standing
from ramify.grammar.compile.job import answer
from ramify.grammar.engine.controls import with_controls
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.matcher import Matcher, mask_words, tokens_of
from ramify.grammar.vocabulary import Vocabulary
from ramify.ring_messages import CompileGrammar, GrammarReady
from ramify.runtime.model.tokenizer.vocabulary import load_vocabulary
from ramify.tool_calls.formats import HARMONY
from ramify.tool_calls.grammar import Tool, calls_or_answer
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
    constraint = calls_or_answer(HARMONY, TOOLS, thought=True, content={"type": "any_text"})
    done = answer(CompileGrammar(key="k", constraint=constraint), vocabulary)
    assert isinstance(done, GrammarReady)
    grammar = load_grammar(done.engine, done.payload, done.enforcement, vocabulary)
    return with_controls(grammar.matcher(), vocabulary)


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(mask_words(320), np.int32)
    return set(tokens_of(row)) if matcher.fill_mask(row, 500) else set(range(256))


def advance(matcher: Matcher, vocabulary: Vocabulary, *parts: str) -> None:
    """Take each part token by token; a mask must allow each, and a control token must be alone in its."""
    spelled = {spelling: token for token, spelling in enumerate(vocabulary.tokens) if spelling}
    for part in parts:
        tokens = [ID[part]] if part in ID else [spelled[bytes([byte])] for byte in part.encode()]
        for token in tokens:
            found = allowed(matcher)
            assert token in found
            assert part not in ID or found == {token}
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


def test_without_such_tokens_nothing_is_wrapped() -> None:
    plain = Vocabulary((b"a", b""), (1,))
    inner: Matcher = object()  # type: ignore[assignment]
    assert with_controls(inner, plain) is inner
