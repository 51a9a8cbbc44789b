"""Schemas of the collection on Ramify, XGrammar and llguidance: what is refused, and what is wrong.

``python -m benchmarks.schemas [--style openapi] [--limit 20] [--detail]``. Every instance is fed token by
token, with the default model's tokenizer. Each library runs in a process of its own that is killed where a
schema takes longer than the limit (seconds); that counts as refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ramify import constraint
from ramify.grammar.compile.policy import compile_constraint, prepare
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.vocabulary import from_tokenizer
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from tests.grammar.collection.case import Case
from tests.grammar.collection.everything import all_cases
from tests.grammar.schema_order import in_schema_order

Accepts = Callable[[str], bool]
Compile = Callable[[Any], Accepts]
"""From a schema to whether a text is an instance; raises for what is refused."""


def with_ramify() -> Compile:
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).tokenizer)
    vocabulary = from_tokenizer(tokenizer, vocab_size=len(tokenizer), stop_ids=[tokenizer.eos_token_id])
    prepare(vocabulary)

    def compiled(schema: Any) -> Accepts:
        grammar = load_grammar(*compile_constraint(constraint.json_schema(schema), vocabulary), vocabulary)

        def accepts(text: str) -> bool:
            matcher = grammar.matcher()
            return (
                all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False)))
                and matcher.complete
            )

        return accepts

    return compiled


def with_xgrammar() -> Compile:
    import xgrammar

    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).tokenizer)
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer), cache_enabled=False
    )

    def compiled(schema: Any) -> Accepts:
        grammar = compiler.compile_json_schema(json.dumps(schema))

        def accepts(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(grammar)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            return all(map(matcher.accept_token, tokens)) and matcher.accept_token(tokenizer.eos_token_id)

        return accepts

    return compiled


def with_llguidance() -> Compile:
    import llguidance
    import llguidance.hf

    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).tokenizer)
    wrapped = llguidance.hf.from_tokenizer(tokenizer)

    def compiled(schema: Any) -> Accepts:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        first = llguidance.LLMatcher(wrapped, source)
        if first.is_error():
            raise ValueError(first.get_error())

        def accepts(text: str) -> bool:
            matcher = first.deep_copy()
            tokens = tokenizer.encode(text, add_special_tokens=False)
            return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

        return accepts

    return compiled


LIBRARIES: dict[str, Callable[[], Compile]] = {
    "ramify": with_ramify,
    "xgrammar": with_xgrammar,
    "llguidance": with_llguidance,
}


class Outcome(NamedTuple):
    compile_ms: float = 0.0
    refused: str = ""
    valid_rejected: int = 0
    invalid_accepted: int = 0


def work(library: str, pipe: Connection) -> None:
    """Answer one `Outcome` for every (schema, valid texts, invalid texts) that comes in."""
    compile_schema = LIBRARIES[library]()
    pipe.send("ready")
    while True:
        schema, valid, invalid = pipe.recv()
        began = time.perf_counter()
        try:
            accepts = compile_schema(schema)
        except Exception as error:
            pipe.send(Outcome(refused=str(error).splitlines()[0] if str(error) else type(error).__name__))
            continue
        elapsed = (time.perf_counter() - began) * 1e3
        rejected = sum(not accepts(text) for text in valid)
        pipe.send(Outcome(elapsed, "", rejected, sum(map(accepts, invalid))))


class Worker:
    """A library in a process that may be killed."""

    def __init__(self, library: str, limit_s: float) -> None:
        self._library = library
        self._limit_s = limit_s
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self._library, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def outcome(self, case: tuple[Any, list[str], list[str]]) -> Outcome:
        self._pipe.send(case)
        try:
            if self._pipe.poll(self._limit_s):
                return self._pipe.recv()
            reason = f"takes more than {self._limit_s:g} s"
        except EOFError:
            reason = "crashed"
        self.close()
        self._start()
        return Outcome(self._limit_s * 1e3, reason)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def topic(case: Case) -> str:
    return case.name.split()[0] if case.style == "suite" else case.style


def written(case: Case) -> tuple[Any, list[str], list[str]]:
    valid, invalid = case.instances
    texts = [[in_schema_order(case.schema, value) for value in values] for values in (valid, invalid)]
    return case.schema, texts[0], texts[1]


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def show(
    library: str, cases: list[Case], instances: list[Any], outcomes: list[Outcome], detail: bool
) -> None:
    served = [
        (case, texts, o) for case, texts, o in zip(cases, instances, outcomes, strict=True) if not o.refused
    ]
    times = [outcome.compile_ms for _, _, outcome in served]
    valid = sum(len(texts[1]) for _, texts, _ in served)
    invalid = sum(len(texts[2]) for _, texts, _ in served)
    rejected = sum(outcome.valid_rejected for _, _, outcome in served)
    accepted = sum(outcome.invalid_accepted for _, _, outcome in served)
    exact = sum(not outcome.valid_rejected and not outcome.invalid_accepted for _, _, outcome in served)
    print(
        f"{library:11}{100 * (1 - len(served) / len(cases)):8.1f}%{100 * exact / len(cases):8.1f}%"
        f"{rejected:8} of {valid}{accepted:8} of {invalid}"
        f"{statistics.median(times):9.1f}{percentile(times, 0.95):8.0f}{max(times):8.0f}"
    )
    if detail:
        for case, outcome in zip(cases, outcomes, strict=True):
            if outcome.refused or outcome.valid_rejected or outcome.invalid_accepted:
                print(f"    {case}: {outcome}")


def by_topic(cases: list[Case], outcomes: dict[str, list[Outcome]]) -> None:
    print("\nSchemas not served exactly (r refused, v a valid instance rejected, i an invalid one accepted):")
    print(f"{'':24}{'schemas':>8}" + "".join(f"{library:>20}" for library in outcomes))
    totals = Counter(map(topic, cases))
    for name in totals:
        line = f"{name:24}{totals[name]:8}"
        for found in outcomes.values():
            own = [outcome for case, outcome in zip(cases, found, strict=True) if topic(case) == name]
            refused = sum(bool(outcome.refused) for outcome in own)
            rejecting = sum(bool(outcome.valid_rejected) for outcome in own)
            accepting = sum(bool(outcome.invalid_accepted) for outcome in own)
            said = " ".join(f"{n}{c}" for n, c in ((refused, "r"), (rejecting, "v"), (accepting, "i")) if n)
            line += f"{said or '-':>20}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--style", help="only cases of this style")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one schema")
    parser.add_argument("--detail", action="store_true", help="every schema that is not served exactly")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.style in (None, case.style)]
    instances = [written(case) for case in cases]
    print(f"{len(cases)} schemas, {sum(len(v) + len(i) for _, v, i in instances)} instances")
    print(f"{'':11}{'refused':>9}{'exact':>9}{'valid rejected':>16}{'invalid accepted':>18}", end="")
    print(f"{'compile ms p50':>16}{'p95':>6}{'max':>8}")
    outcomes: dict[str, list[Outcome]] = {}
    for library in LIBRARIES:
        worker = Worker(library, arguments.limit)
        outcomes[library] = [worker.outcome(texts) for texts in instances]
        worker.close()
        show(library, cases, instances, outcomes[library], arguments.detail)
    by_topic(cases, outcomes)


if __name__ == "__main__":
    main()
