"""llguidance: an Earley parser over a lexer, for schemas, regular expressions and Lark grammars.

In Lark's notation, constructs that name tokens and attributes that set sampling are refused: a constraint
describes text.
"""

from __future__ import annotations

import contextlib
import random
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
import numpy as np

from ramify.constraint import Constraint, Kind, alternation
from ramify.errors import EngineError, InvalidConstraint
from ramify.grammar.engine.lark_rules import endless_rule
from ramify.grammar.engine.prefix_matcher import fewest_tokens, with_prefix
from ramify.grammar.matcher import EXACT, Matcher, allow, check_rollback, mask_words, tokens_of
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement
from ramify.text import shortened

_LIMITS = llguidance.LLParserLimits(max_items_in_row=500, step_max_items=10_000, step_lexer_fuel=50_000)
"""Limits of a quarter of llguidance's defaults or less. One ambiguous grammar must not delay the decoding
step of all requests: with rows of 2,000 items, a step of such a grammar takes 0.1 s."""

WALKS, WALK_TOKENS = 4, 16
"""Number of random texts that a grammar is tried with when it is compiled, and the most tokens of each."""

_SIMPLIFY = (
    'In Lark\'s notation, write a long list of alternatives as one terminal (WORD: "a" | "b" | …) and '
    "repetitions left-recursively; or write the grammar in GBNF, which has no such limit."
)

_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|#[^\n]*')
_REFUSED = {
    re.compile(r"<\[|<\|"): "tokens (<[…]>, <|…|>)",
    re.compile(r"\w\[[^\]]*\b(?:temperature|max_tokens|stop_capture|capture)\b"): (
        "sampling attributes (temperature, max_tokens, capture)"
    ),
}
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")


class _Tokens:
    """A vocabulary in the form that llguidance expects of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.stop_ids[0]
        # 0xff marks tokens that are not text; llguidance requires that all tokens differ.
        self.tokens = [spelling or b"\xff<%d>" % token for token, spelling in enumerate(vocabulary.tokens)]
        self.special_token_ids = [token for token, spelling in enumerate(vocabulary.tokens) if not spelling]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return fewest_tokens(data, self._vocabulary)[0]


_tokenizers: weakref.WeakKeyDictionary[Vocabulary, llguidance.LLTokenizer] = weakref.WeakKeyDictionary()


def tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """llguidance's tokenizer for `vocabulary`, made once."""
    if vocabulary not in _tokenizers:
        if not vocabulary.stop_ids:
            raise InvalidConstraint("The model has no stop token, which llguidance needs.")
        tokens: Any = _Tokens(vocabulary)
        _tokenizers[vocabulary] = llguidance.LLTokenizer(
            tokens, n_vocab=vocabulary.size, eos_token=list(vocabulary.stop_ids)
        )
    return _tokenizers[vocabulary]


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> bytes:
    """Check and compile a constraint. Returns the payload of an `LLGuidanceGrammar`, llguidance's own form of
    the source.

    Raises `InvalidConstraint` with llguidance's reason, and with line and column if llguidance gives them.
    Raises it also if ``start`` needs a rule that no text satisfies, with the line of that rule.
    """
    kind = constraint.kind
    if kind == "lark":
        check_lark(constraint.source)
    payload = _source(constraint).encode()
    inner = _matcher(payload, vocabulary)
    if inner.is_error():
        lacks_start = kind == "lark" and _START.search(constraint.source) is None
        remedy = _NO_START if lacks_start else None
        raise InvalidConstraint(_reason(inner.get_error(), kind), field=kind, remedy=remedy)
    # With `lenient`, llguidance warns of the keywords that it ignores; these are reported as unenforced.
    if constraint.strict is True and (warnings := inner.get_grammar_warnings()):
        raise InvalidConstraint(_reason(str(warnings[0]), kind), field=kind)
    if kind == "lark":
        _check_ends(constraint.source, vocabulary)
    if _matches_nothing(inner, vocabulary, kind):
        raise InvalidConstraint(
            f"No text that this model's tokenizer can spell satisfies the {_NAMES[kind]}.", field=kind
        )
    with _naming(kind):
        _try(inner, vocabulary)
    return payload


def _try(inner: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
    """Raise `InvalidConstraint` if llguidance reaches one of its limits in a few random texts. Nearly all
    grammars that exceed the limits do so within the first words."""
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    for seed in range(WALKS):
        chooser = random.Random(seed)
        matcher = LLGuidanceMatcher(inner.deep_copy(), vocabulary, ())
        with contextlib.suppress(_DeadEnd):
            for _ in range(WALK_TOKENS):
                matcher.fill_mask(row)
                allowed = tokens_of(row)
                if not allowed or not matcher.accept(chooser.choice(allowed)) or matcher.finished:
                    break


@contextlib.contextmanager
def _naming(kind: Kind) -> Iterator[None]:
    """Change an `InvalidConstraint` that is raised inside: set its `field` to `kind`, and prefix its message
    with "The … is too complex"."""
    try:
        yield
    except InvalidConstraint as error:
        error.field = kind
        error.message = f"The {_NAMES[kind]} is too complex: {error.message}"
        raise


def check_lark(grammar: str) -> None:
    """Raise `InvalidConstraint` if a grammar in Lark's notation names tokens or sets sampling attributes."""
    bare = _QUOTED.sub('""', grammar)
    for pattern, what in _REFUSED.items():
        if (found := pattern.search(bare)) is not None:
            line = bare.count("\n", 0, found.start()) + 1
            raise InvalidConstraint(f"The grammar, line {line}: {what} are not supported.", field="lark")


def _check_ends(grammar: str, vocabulary: Vocabulary) -> None:
    """Raise `InvalidConstraint` if ``start`` needs a rule that no text satisfies."""
    make = llguidance.LLMatcher.grammar_from_lark
    endless = endless_rule(
        grammar, lambda part: _matches_nothing(_matcher(make(part).encode(), vocabulary), vocabulary, "lark")
    )
    if endless is None:
        return
    why = "never ends: each of its alternatives calls it again" if endless.recursive else "matches no text"
    raise InvalidConstraint(
        f"The grammar, line {endless.line}: {endless.rule!r} {why}.",
        field="lark",
        remedy="Give it an alternative that ends." if endless.recursive else "Correct it, or leave it out.",
    )


def _matches_nothing(inner: llguidance.LLMatcher, vocabulary: Vocabulary, kind: Kind) -> bool:
    """Whether no text matches: no token may come first, and the empty text does not match. Raises
    `InvalidConstraint` if llguidance reaches one of its limits."""
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    with _naming(kind):
        try:
            LLGuidanceMatcher(inner, vocabulary, ()).fill_mask(row)
        except _DeadEnd:
            return True
    return not row.any()


_START = re.compile(r"^\s*[!?]*start\b[^:\n]*:", re.MULTILINE)
_NO_START = "A grammar begins with the rule start: … in Lark's notation, or root ::= … in GBNF."

_NAMES: dict[Kind, str] = {
    "json_schema": "schema",
    "json_object": "schema",
    "regex": "pattern",
    "choices": "list of choices",
    "lark": "grammar",
}


def _source(constraint: Constraint) -> str:
    make = llguidance.LLMatcher
    if constraint.kind == "lark":
        return make.grammar_from_lark(constraint.source)
    if constraint.kind == "choices":
        return make.grammar_from_regex(alternation(constraint.source))
    if constraint.kind == "regex":
        return make.grammar_from_regex(constraint.source)
    options: Any = {"lenient": constraint.strict is not True, "whitespace_flexible": False}
    match constraint.whitespace:
        case "natural":
            options |= {"item_separator": ", ", "key_separator": ": "}
        case "compact" | 0:
            pass
        case most:
            options = {"lenient": options["lenient"], "whitespace_pattern": rf"[ \t\n\r]{{0,{most}}}"}
    return make.grammar_from_json_schema(constraint.source or '{"type": "object"}', overrides=options)


def _matcher(payload: bytes, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(tokenizer(vocabulary), payload.decode(), log_level=0, limits=_LIMITS)


def _reason(message: str, kind: Kind = "lark") -> str:
    """The first line of llguidance's message and, if the message has one, the line with the reason of its
    regex parser. The other lines may repeat the grammar or list all tokens."""
    lines = message.strip().splitlines() or [""]
    if lines[0].endswith("parse error:"):
        lines[0] += "".join(
            [f" {line.removeprefix('error: ')}" for line in lines if line.startswith("error: ")]
        )
    first = _first_line(lines[0])
    found = _PLACE.match(first)
    if found is None or kind != "lark":
        return f"The {_NAMES[kind]}: {first}."
    return f"The grammar, line {found[1]}, column {found[2]}: {found[3]}."


def _first_line(message: str) -> str:
    return shortened((message.strip().splitlines() or ["it is not valid"])[0], 300).rstrip(" .:")


class _DeadEnd(InvalidConstraint):
    """Error: no token may come next, though the text is not complete."""


class LLGuidanceGrammar:
    """A grammar, read from the payload that `compile_constraint` returned."""

    def __init__(self, payload: bytes, vocabulary: Vocabulary, enforcement: Enforcement = EXACT) -> None:
        self.enforcement = enforcement
        self._inner = _matcher(payload, vocabulary)
        if self._inner.is_error():
            raise EngineError(f"The compiled grammar cannot be read: {_reason(self._inner.get_error())}")
        self._vocabulary = vocabulary
        self.nbytes = 64 * len(payload)  # an estimate: llguidance does not report it

    def matcher(self, prefix: bytes = b"") -> Matcher:
        inner = LLGuidanceMatcher(self._inner.deep_copy(), self._vocabulary, ())
        return with_prefix(inner, prefix, self._vocabulary)


class LLGuidanceMatcher:
    """A matcher that wraps llguidance's own matcher. If text is forced, the mask allows only the token that
    the tokenizer would choose; `accept` accepts any tokens that spell the text. `steps` has, for each
    accepted token or text, the number of tokens that llguidance consumed; 0 for a stop token."""

    completion_tokens = None

    def __init__(self, inner: llguidance.LLMatcher, vocabulary: Vocabulary, steps: Sequence[int]) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._steps = list(steps)
        self._finished = False

    def accept(self, token: int) -> bool:
        if self._finished or not 0 <= token < self._vocabulary.size:
            return False
        if token in self._vocabulary.stop_ids:
            self._finished = self.complete
            if self._finished:
                self._steps.append(0)
            return self._finished
        return bool(self._vocabulary.tokens[token]) and self._consume([token])

    def accept_bytes(self, data: bytes) -> bool:
        tokens = fewest_tokens(data, self._vocabulary)[0]
        return bool(tokens) and not self._finished and self._consume(tokens)

    def _consume(self, tokens: list[int]) -> bool:
        if self._inner.is_stopped():
            return False
        taken = self._inner.try_consume_tokens(tokens)
        self._check()
        if taken < len(tokens):
            self._inner.rollback(taken)
            return False
        self._steps.append(taken)
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        row[:] = 0
        if self._finished:
            return True
        if not self._inner.is_stopped():
            self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._check()
        allow(row, self._vocabulary.stop_ids, self.complete)
        return True

    def _check(self) -> None:
        """Raise the error that llguidance has recorded, if any; in most cases a limit was reached. llguidance
        itself raises nothing."""
        if not self._inner.is_error():
            return
        reason = self._inner.get_error()
        if "NoExtension" in reason:
            raise _DeadEnd(f"llguidance finds no token that may come here: {_first_line(reason)}.")
        raise InvalidConstraint(f"llguidance reached a limit: {_first_line(reason)}.", remedy=_SIMPLIFY)

    def forced_bytes(self) -> bytes:
        if self._finished or self.complete:
            return b""
        return self._inner.compute_ff_bytes()

    def rollback(self, count: int) -> None:
        check_rollback(count, len(self._steps))
        if count:
            taken = sum(self._steps[-count:])
            del self._steps[-count:]
            self._finished = False
            if taken:
                self._inner.rollback(taken)

    def fork(self) -> Matcher:
        twin = LLGuidanceMatcher(self._inner.deep_copy(), self._vocabulary, self._steps)
        twin._finished = self._finished
        return twin

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def complete(self) -> bool:
        return bool(self._inner.is_accepting())
