"""Context-free grammars through XGrammar: masks from a pushdown automaton over a preprocessed vocabulary."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import xgrammar

from ramify.errors import InvalidConstraint
from ramify.runtime.grammar.matcher import Matcher, mask_words, single_token
from ramify.runtime.grammar.prefix_matcher import PrefixMatcher
from ramify.runtime.grammar.vocabulary import Vocabulary

_tokenizer_infos: weakref.WeakKeyDictionary[Vocabulary, xgrammar.TokenizerInfo] = weakref.WeakKeyDictionary()


def tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """XGrammar's own view of the vocabulary, sorted once (20 ms at 49k tokens)."""
    if vocabulary not in _tokenizer_infos:
        _tokenizer_infos[vocabulary] = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
    return _tokenizer_infos[vocabulary]


def compile_ebnf(grammar: str, vocabulary: Vocabulary) -> bytes:
    """The serialised grammar. Raises `InvalidConstraint` with XGrammar's reason for a bad one."""
    return _serialised(_compiler(vocabulary).compile_grammar, grammar, vocabulary)


def compile_structural_tag(tag: str, vocabulary: Vocabulary) -> bytes:
    """The serialised grammar. Raises `InvalidConstraint` with XGrammar's reason for a bad one."""
    return _serialised(_compiler(vocabulary).compile_structural_tag, tag, vocabulary)


def _compiler(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    # One thread: a compile must not take the scheduler's cores. Caching is the grammar store's.
    return xgrammar.GrammarCompiler(tokenizer_info(vocabulary), max_threads=1, cache_enabled=False)


def _serialised(
    compile_source: Callable[[str], xgrammar.CompiledGrammar], source: str, vocabulary: Vocabulary
) -> bytes:
    try:
        compiled = compile_source(source)
    except (RuntimeError, ValueError) as error:
        raise InvalidConstraint(f"The grammar cannot be compiled: {_reason(error)}.") from None
    row = np.zeros((1, mask_words(vocabulary.size)), np.int32)
    if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(row, 0) and not row.any():
        raise InvalidConstraint("No text that this model's tokenizer can spell satisfies the grammar.")
    return compiled.serialize_json().encode()


def _reason(error: Exception) -> str:
    """The library's message without its time stamp and source line."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    _, _, rest = text.partition(": ") if text.startswith("[") else ("", "", text)
    return (rest or text).rstrip(".")


class XGrammarGrammar:
    """A compiled grammar, read from what `compile_ebnf` or `compile_structural_tag` returned."""

    def __init__(self, payload: bytes, vocabulary: Vocabulary) -> None:
        self._compiled = xgrammar.CompiledGrammar.deserialize_json(
            payload.decode(), tokenizer_info(vocabulary)
        )
        self._vocabulary = vocabulary
        self.nbytes: int = self._compiled.memory_size_bytes

    def matcher(self, prefix: bytes = b"") -> Matcher:
        inner = XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary, 0)
        return PrefixMatcher(inner, prefix, self._vocabulary) if prefix else inner


class XGrammarMatcher:
    free = False

    def __init__(self, inner: xgrammar.GrammarMatcher, vocabulary: Vocabulary, accepted: int) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._accepted = accepted

    def accept(self, token: int) -> bool:
        if self.finished or not 0 <= token < self._vocabulary.size:
            return False
        # XGrammar would write a warning to stderr for each of these.
        if not self._vocabulary.tokens[token] and token not in self._vocabulary.stop_ids:
            return False
        if not self._inner.accept_token(token):
            return False
        self._accepted += 1
        return True

    def accept_bytes(self, data: bytes) -> bool:
        if self.finished or not self._inner.accept_string(data):
            return False
        self._accepted += 1
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        if self.finished:
            row[:] = 0
            return True
        return bool(self._inner.fill_next_token_bitmask(row.reshape(1, -1), 0))

    def forced_token(self) -> int | None:
        row = np.empty(mask_words(self._vocabulary.size), np.int32)
        return single_token(row) if self.fill_mask(row) else None

    def forced_bytes(self) -> bytes:
        return b"" if self.finished else self._inner.find_jump_forward_string().encode()

    @property
    def completion_tokens(self) -> int | None:
        return None

    def completion(self) -> list[int] | None:
        return None

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._accepted:
            raise ValueError(f"Cannot take back {count} of {self._accepted} accepted tokens.")
        if count:
            self._inner.rollback(count)
            self._accepted -= count

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._inner.fork(), self._vocabulary, self._accepted)

    @property
    def finished(self) -> bool:
        return bool(self._inner.is_terminated())

    @property
    def complete(self) -> bool:
        return bool(self._inner.is_completed())
