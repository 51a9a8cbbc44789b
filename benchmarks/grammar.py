"""Compile and mask times of typical constraints, beside those of other grammar engines alone, in one run.

``python -m benchmarks.grammar [--rounds 5] [--engines ramify,xgrammar,…] [--tokens 131072]``, one thread.

Every schema comes with a text that is fed token by token. All engines take turns, so that the state of the
machine affects them alike. "first" is the time of a mask in states that no request has met yet, "again" that
of a second request, both in microseconds; the least time of a mask over the rounds counts. Measured with the
default model's vocabulary, and with one that is enlarged to ``--tokens`` by pairs of its tokens and
characters of other scripts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.masks.token_trie import token_trie
from ramify.grammar.compile.policy import compile_constraint, prepare
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.matcher import mask_words
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary
from tests.grammar.vocabularies import tokenise

STRING: dict[str, Any] = {"type": "string"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "verdict": (
        {
            "type": "object",
            "properties": {
                "score": {"type": "integer", "minimum": 1, "maximum": 5},
                "reason": {"type": "string", "maxLength": 120},
            },
            "required": ["score", "reason"],
        },
        '{"score": 3, "reason": "Clear, but the third part repeats what the first has said."}',
    ),
    "person": (
        {
            "type": "object",
            "properties": {
                "name": STRING,
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "email": {"type": "string", "format": "email"},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
                "score": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": ["name", "age", "score"],
        },
        '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "tags": ["a", "b"], "score": 0.5}',
    ),
    "60 optional": (
        {"type": "object", "properties": {f"field_{i}": STRING for i in range(60)}},
        '{"field_3": "x", "field_59": "some more text"}',
    ),
    "tree": (
        {
            "type": "object",
            "properties": {"value": STRING, "children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["value", "children"],
        },
        '{"value": "root", "children": [{"value": "leaf", "children": []}, {"value": "x", "children": []}]}',
    ),
    "any object": (
        {"type": "object"},
        '{"a": [[1, 2.5e3], {"b": "Some text, \\"quoted\\", and 日本語."}], "c": null, "deep": {"d": {}}}',
    ),
    "closed order": (
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[a-z][a-z0-9-]{2,30}$"},
                "status": {"enum": ["open", "paid", "sent", "lost"]},
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"sku": STRING, "count": {"type": "integer", "minimum": 1}},
                        "required": ["sku", "count"],
                        "additionalProperties": False,
                    },
                },
                "note": {"type": ["string", "null"]},
            },
            "required": ["id", "status", "lines", "note"],
            "additionalProperties": False,
        },
        '{"id": "order-1", "status": "paid", "lines": [{"sku": "A-1", "count": 2}, {"sku": "B", "count": 9}],'
        ' "note": null}',
    ),
}

Fill = Callable[[np.ndarray], object]
Accept = Callable[[int], bool]


class Engine(Protocol):
    def compile(self, schema: dict[str, Any]) -> Callable[[], tuple[Fill, Accept]]:
        """Compile `schema`. Returns a function that begins a request and returns (function that fills a mask,
        function that accepts a token)."""
        ...


class Ramify:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        prepare(vocabulary)

    def compile(self, schema: dict[str, Any]) -> Callable[[], tuple[Fill, Accept]]:
        compiled = compile_constraint(constraint.json_schema(schema), self._vocabulary)
        grammar = load_grammar(*compiled, self._vocabulary)

        def begin() -> tuple[Fill, Accept]:
            matcher = grammar.matcher()
            return matcher.fill_mask, matcher.accept

        return begin


class XGrammar:
    def __init__(self, vocabulary: Vocabulary, *, strict_mode: bool = True) -> None:
        import xgrammar

        from ramify.grammar.engine.xgrammar import tokenizer

        self._strict_mode = strict_mode
        self._matcher = xgrammar.GrammarMatcher
        self._compiler = xgrammar.GrammarCompiler(tokenizer(vocabulary), max_threads=1, cache_enabled=False)

    def compile(self, schema: dict[str, Any]) -> Callable[[], tuple[Fill, Accept]]:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=self._strict_mode)

        def begin() -> tuple[Fill, Accept]:
            matcher = self._matcher(compiled)
            return lambda row: matcher.fill_next_token_bitmask(row.reshape(1, -1), 0), matcher.accept_token

        return begin


class LLGuidance:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        from ramify.grammar.engine.llguidance import tokenizer

        self._tokenizer = tokenizer(vocabulary)
        self._library = llguidance

    def compile(self, schema: dict[str, Any]) -> Callable[[], tuple[Fill, Accept]]:
        from llguidance.numpy import fill_next_token_bitmask

        matcher_type = self._library.LLMatcher
        source = matcher_type.grammar_from_json_schema(json.dumps(schema))
        first = matcher_type(self._tokenizer, source, log_level=0)
        if first.is_error():
            raise ValueError(first.get_error())

        def begin() -> tuple[Fill, Accept]:
            matcher = first.deep_copy()
            return lambda row: fill_next_token_bitmask(matcher, row.reshape(1, -1)), matcher.consume_token

        return begin


class Outlines:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import outlines_core

        self._library = outlines_core
        self._stop_ids = vocabulary.stop_ids
        self._vocabulary = outlines_core.Vocabulary(vocabulary.stop_ids[0], token_trie(vocabulary).ids_of)

    def compile(self, schema: dict[str, Any]) -> Callable[[], tuple[Fill, Accept]]:
        from outlines_core.json_schema import build_regex_from_schema

        index = self._library.Index(build_regex_from_schema(json.dumps(schema)), self._vocabulary)

        def begin() -> tuple[Fill, Accept]:
            guide = self._library.Guide(index)

            def fill(row: np.ndarray) -> None:
                guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)

            def accept(token: int) -> bool:
                if token in self._stop_ids:
                    return guide.is_finished()
                if not guide.accepts_tokens([token]):
                    return False
                guide.advance(token, return_tokens=False)
                return True

            return fill, accept

        return begin


ENGINES: dict[str, Callable[[Vocabulary], Engine]] = {
    "ramify": Ramify,
    "xgrammar": XGrammar,
    "llguidance": LLGuidance,
    "outlines": Outlines,
}
SLOW = {"outlines": ("verdict",)}
"""Engine → the only cases in which it is measured. It takes many seconds for each other case."""


class Times(NamedTuple):
    compile: float
    first: list[float]
    again: list[float]


def measured(engine: Engine, schema: dict[str, Any], tokens: Sequence[int], row: np.ndarray) -> Times:
    began = time.perf_counter()
    begin = engine.compile(schema)
    elapsed = (time.perf_counter() - began) * 1e3
    return Times(elapsed, mask_times(begin, tokens, row), mask_times(begin, tokens, row))


def mask_times(
    begin: Callable[[], tuple[Fill, Accept]], tokens: Sequence[int], row: np.ndarray
) -> list[float]:
    fill, accept = begin()
    times = []
    for token in tokens:
        began = time.perf_counter()
        fill(row)
        times.append((time.perf_counter() - began) * 1e6)
        if not accept(token):
            raise ValueError("rejects the text")
    return times


def least(rounds: list[Times]) -> Times:
    return Times(
        min(times.compile for times in rounds),
        [min(masks) for masks in zip(*(times.first for times in rounds), strict=True)],
        [min(masks) for masks in zip(*(times.again for times in rounds), strict=True)],
    )


def enlarged(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """`vocabulary` with new tokens, up to `size`. Three in four of the new tokens are pairs of old tokens,
    the others one to three letters of other scripts."""
    chooser = random.Random(0)
    old = [token for token in vocabulary.tokens if token.isascii() and 1 < len(token) < 8]
    letters = [chr(point) for point in (*range(0x400, 0x450), *range(0x4E00, 0x6E00), *range(0x3041, 0x30FF))]
    known = set(vocabulary.tokens)
    new: list[bytes] = []
    while vocabulary.size + len(new) < size:
        if chooser.random() < 0.75:
            token = chooser.choice(old) + chooser.choice(old)
        else:
            token = "".join(chooser.choices(letters, k=chooser.randint(1, 3))).encode()
        if token not in known:
            known.add(token)
            new.append(token)
    return Vocabulary((*vocabulary.tokens, *new), vocabulary.stop_ids)


def percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def report(name: str, engine: str, times: Times) -> None:
    masks = "".join(
        f"{percentile(part, 0.5):10.1f}{percentile(part, 0.99):9.1f}" for part in (times.first, times.again)
    )
    print(f"{name:14}{engine:12}{times.compile:11.1f}{masks}", flush=True)


def compare(vocabulary: Vocabulary, names: Sequence[str], rounds: int) -> None:
    engines = {name: ENGINES[name](vocabulary) for name in names}
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    everything: dict[str, list[Times]] = {name: [] for name in names}
    print(f"\n{vocabulary.size} tokens")
    print(f"{'':14}{'':12}{'compile ms':>11}{'first p50':>10}{'p99':>9}{'again p50':>10}{'p99':>9}")
    for case, (schema, text) in CASES.items():
        tokens = tokenise(text, vocabulary)
        taken: dict[str, list[Times]] = {name: [] for name in names if case in SLOW.get(name, CASES)}
        refused: dict[str, str] = {}
        for _ in range(rounds):
            for name in taken:
                if name not in refused:
                    try:
                        taken[name].append(measured(engines[name], schema, tokens, row))
                    except (InvalidConstraint, ValueError, RuntimeError) as error:
                        refused[name] = str(error).splitlines()[0][:70]
        for name, times in taken.items():
            if name in refused:
                print(f"{case:14}{name:12} {refused[name]}")
                continue
            everything[name].append(least(times))
            report(case, name, everything[name][-1])
    for name, all_times in everything.items():
        if all_times:
            compiles = [times.compile for times in all_times]
            first = [mask for times in all_times for mask in times.first]
            again = [mask for times in all_times for mask in times.again]
            report("all", name, Times(percentile(compiles, 0.5), first, again))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default=",".join(ENGINES), help="of " + ", ".join(ENGINES))
    parser.add_argument("--tokens", type=int, default=131_072, help="size of the enlarged vocabulary")
    arguments = parser.parse_args()
    folder = resolve(DEFAULT_MODEL).tokenizer
    vocabulary = load_vocabulary(folder, vocab_size=49_152, stop_ids=[2])
    for each in (vocabulary, enlarged(vocabulary, arguments.tokens)):
        compare(each, arguments.engines.split(","), arguments.rounds)


if __name__ == "__main__":
    main()
