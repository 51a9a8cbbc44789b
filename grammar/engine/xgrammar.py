"""XGrammar: an Earley parser over bytes, with masks precomputed for each state of its rules.

XGrammar imports torch and transformers (2 s), so only a process that uses XGrammar imports this module.
"""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import xgrammar

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.engine.prefix_matcher import with_prefix
from ramify.grammar.matcher import EXACT, Matcher, check_rollback, mask_words
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement
from ramify.text import shortened

P = ParamSpec("P")
R = TypeVar("R")

_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_tokenizers: weakref.WeakKeyDictionary[Vocabulary, xgrammar.TokenizerInfo] = weakref.WeakKeyDictionary()


def tokenizer(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """XGrammar's own view of `vocabulary`, made once."""
    if vocabulary not in _tokenizers:
        if not vocabulary.stop_ids:
            raise InvalidConstraint("The model has no stop token, which XGrammar needs.")
        _tokenizers[vocabulary] = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
    return _tokenizers[vocabulary]


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> bytes:
    """Compile a constraint. Returns the payload of an `XGrammarGrammar`. Raises `InvalidConstraint` with
    XGrammar's reason."""
    compiler = xgrammar.GrammarCompiler(tokenizer(vocabulary), max_threads=1, cache_enabled=False)
    try:
        compiled = _compiled(compiler, constraint)
    except RuntimeError as error:
        raise InvalidConstraint(f"XGrammar refuses it: {_reason(error)}.", field=constraint.kind) from None
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(row.reshape(1, -1))
    if not row.any():
        raise InvalidConstraint(
            "No text that this model's tokenizer can spell satisfies the constraint.", field=constraint.kind
        )
    return compiled.serialize_json().encode()


def _compiled(compiler: xgrammar.GrammarCompiler, constraint: Constraint) -> xgrammar.CompiledGrammar:
    match constraint.kind:
        case "regex":
            return compiler.compile_regex(constraint.source)
        case "choices":
            return compiler.compile_grammar(
                "root ::= " + " | ".join(map(_quoted, json.loads(constraint.source)))
            )
        case "ebnf":
            return compiler.compile_grammar(constraint.source)
        case "structural_tag":
            return compiler.compile_structural_tag(constraint.source)
    style: dict[str, Any] = {"any_whitespace": False, "separators": (", ", ": ")}
    if constraint.whitespace in ("compact", 0):
        style["separators"] = (",", ":")
    elif constraint.whitespace != "natural":
        style = {"any_whitespace": True, "max_whitespace_cnt": constraint.whitespace}
    # Without strict_mode, XGrammar lets an object repeat a named property with a value of any type.
    return compiler.compile_json_schema(
        constraint.source or _OBJECT, strict_mode=bool(constraint.source), **style
    )


def _quoted(text: str) -> str:
    """`text` as a string literal of XGrammar's EBNF."""
    return '"' + "".join(char if char.isalnum() else f"\\U{ord(char):08x}" for char in text) + '"'


_OBJECT = json.dumps({"type": "object"})


def _reason(error: RuntimeError) -> str:
    """XGrammar's message, without the time stamp and the source line."""
    message = _SOURCE.sub("", " ".join(str(error).split()))
    return shortened(message.rstrip(" ."), 300) or "it is not valid"


class XGrammarGrammar:
    """A grammar, read from the payload that `compile_constraint` returned."""

    def __init__(self, payload: bytes, vocabulary: Vocabulary, enforcement: Enforcement = EXACT) -> None:
        self.enforcement = enforcement
        self._compiled = xgrammar.CompiledGrammar.deserialize_json(payload.decode(), tokenizer(vocabulary))
        self._vocabulary = vocabulary
        self.nbytes = self._compiled.memory_size_bytes

    def matcher(self, prefix: bytes = b"") -> Matcher:
        inner = XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)
        return with_prefix(inner, prefix, self._vocabulary)


def _telling(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap `call` so that failures inside XGrammar, which mostly are limits, raise `InvalidConstraint`."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise InvalidConstraint(
                f"XGrammar cannot go on with it: {_reason(error)}.",
                remedy="Simplify it, or use grammar_backend='auto' (--grammar-backend auto).",
            ) from None

    return checked


class XGrammarMatcher:
    """A matcher that wraps XGrammar's own matcher. XGrammar cannot tell how many tokens complete the text, so
    a budget has no effect."""

    completion_tokens = None

    def __init__(self, inner: xgrammar.GrammarMatcher, vocabulary: Vocabulary, accepted: int = 0) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._accepted = accepted

    @_telling
    def accept(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._vocabulary.size:
            return False
        return self._count(self._inner.accept_token(token))

    @_telling
    def accept_bytes(self, data: bytes) -> bool:
        return not self.finished and self._count(self._inner.accept_string(data))

    def _count(self, taken: bool) -> bool:
        self._accepted += taken
        return taken

    @_telling
    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if self.finished:
            row[:] = 0
        else:
            self._inner.fill_next_token_bitmask(row.reshape(1, -1))
        return True

    @_telling
    def forced_bytes(self) -> bytes:
        if self.finished or self.complete:
            return b""
        try:
            return self._inner.find_jump_forward_string().encode()
        except UnicodeDecodeError as cut:  # the text ends inside a character
            return cut.object

    def rollback(self, count: int) -> None:
        check_rollback(count, self._accepted)
        if count:
            self._inner.rollback(count)
            self._accepted -= count

    def fork(self) -> Matcher:
        return XGrammarMatcher(self._inner.fork(), self._vocabulary, self._accepted)

    @property
    def finished(self) -> bool:
        return self._inner.is_terminated()

    @property
    def complete(self) -> bool:
        return self._inner.is_completed()
