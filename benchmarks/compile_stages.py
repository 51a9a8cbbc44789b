"""Where the processor time of compiling a schema goes: p50, p95 and most of each stage over the collection.

``python -m benchmarks.compile_stages [--written] [--style openapi] [--slowest 10] [--limit 10]``, one thread,
the default model's vocabulary. As in the server, each schema is compiled in a child process, so that no
schema profits from the ones before it. A child compiles and loads `policy.PREPARED` first: the pages of
memory that it shares with its parent are copied then (some 1,000 for the rules alone, of 4 us each). A child
that takes more than the limit (seconds) is killed.

A stage is the time in one function without the stages inside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from benchmarks.schemas import percentile
from ramify import constraint
from ramify.errors import RamifyError
from ramify.grammar.compile import policy
from ramify.grammar.engine import load
from ramify.grammar.matcher import Grammar, mask_words
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.tokenizer.vocabulary import load_vocabulary
from tests.grammar.collection import real_world
from tests.grammar.collection.everything import all_cases

STAGES = {
    "parse and check": ("schema.compiler:SchemaDocument", "compile.policy:parse_json"),
    "schema to rules": ("compile.policy:compile_schema",),
    "called rules": ("automaton.construction.compiler:called_rules",),
    "nodes": ("automaton.construction.compiler:flatten",),
    "states": ("automaton.construction.compiler:construct",),
    "bytes": ("automaton.construction.byte_edges:to_bytes",),
    "costs": (
        "automaton.construction.costs:shortest",
        "automaton.construction.pruning:pruned",
        "automaton.construction.costs:token_costs",
    ),
    "runs": ("automaton.construction.compiler:runs",),
    "other compiling": ("compile.policy:compile_constraint",),
    "load": ("engine.load:load_grammar",),
}
"""The functions of each stage, as module and name in `ramify.grammar`."""

ALL, FIRST_MASK = "all but the mask", "first mask"

Times = dict[str, float]
"""Milliseconds of processor time by stage."""


class Stopwatch:
    """Exclusive times: while an inner stage runs, the outer one stands still."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self.clear()

    def clear(self) -> None:
        self.times: Times = dict.fromkeys(STAGES, 0.0)
        self._since = time.thread_time()

    def _lap(self) -> None:
        now = time.thread_time()
        if self._path:
            self.times[self._path[-1]] += 1e3 * (now - self._since)
        self._since = now

    def attach(self, stage: str, place: str) -> None:
        """Count the time in the function that `place` names to `stage`."""
        module, _, name = place.partition(":")
        owner = importlib.import_module(f"ramify.grammar.{module}")
        timed: Callable[..., Any] = getattr(owner, name)

        @wraps(timed)
        def call(*arguments: Any, **named: Any) -> Any:
            self._lap()
            self._path.append(stage)
            try:
                return timed(*arguments, **named)
            finally:
                self._lap()
                self._path.pop()

        setattr(owner, name, call)


def stages_of(schema: Any, vocabulary: Vocabulary) -> Times | str:
    """The times of one schema, or why it is refused."""
    stopwatch = Stopwatch()
    for stage, places in STAGES.items():
        for place in places:
            stopwatch.attach(stage, place)
    wanted = constraint.json_schema(schema)
    first_mask(load.load_grammar(*policy.compile_constraint(policy.PREPARED, vocabulary), vocabulary))
    stopwatch.clear()
    try:
        compiled = policy.compile_constraint(wanted, vocabulary)
    except RamifyError as refused:
        return str(refused)
    grammar = load.load_grammar(*compiled, vocabulary)
    times = stopwatch.times
    times[ALL] = sum(times.values())
    times[FIRST_MASK] = first_mask(grammar)
    return times


def first_mask(grammar: Grammar) -> float:
    matcher = grammar.matcher()
    row = np.zeros(mask_words(grammar.vocabulary.size), np.int32)
    began = time.thread_time()
    matcher.fill_mask(row)
    return 1e3 * (time.thread_time() - began)


def in_child(schema: Any, vocabulary: Vocabulary, limit_s: int) -> Times | str:
    """`stages_of` in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            gc.disable()  # as `child_jobs`
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            os.write(writing, json.dumps(stages_of(schema, vocabulary)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    found: Times | str = json.loads(answer) if answer else f"takes more than {limit_s} s, or crashes"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--written", action="store_true", help="the schemas written for the tests instead")
    parser.add_argument("--style", help="only schemas of this style")
    parser.add_argument("--slowest", type=int, default=10, help="how many of the slowest are shown")
    parser.add_argument("--limit", type=int, default=10, help="seconds for one schema")
    arguments = parser.parse_args()
    vocabulary = load_vocabulary(resolve(DEFAULT_MODEL).tokenizer, vocab_size=49_152, stop_ids=[2])
    policy.prepare(vocabulary)
    served: dict[str, Times] = {}
    everything = all_cases() if arguments.written else real_world.cases()
    for case in everything:
        if arguments.style in (None, case.style):
            times = in_child(case.schema, vocabulary, arguments.limit)
            if isinstance(times, str):
                print(f"{case}: {times.splitlines()[0][:120]}")
            else:
                served[repr(case)] = times
    print(f"\n{len(served)} schemas; milliseconds{'':4}{'p50':>10}{'p95':>10}{'most':>10}{'sum':>10}")
    for stage in (*STAGES, ALL, FIRST_MASK):
        column = [times[stage] for times in served.values()]
        figures = (percentile(column, 0.5), percentile(column, 0.95), max(column), sum(column))
        print(f"{stage:28}" + "".join(f"{figure:10.2f}" for figure in figures))
    print(f"\n{'the slowest':40}" + "".join(f"{stage.split()[0]:>10}" for stage in (ALL, *STAGES)))
    for name in sorted(served, key=lambda name: -served[name][ALL])[: arguments.slowest]:
        print(
            f"{name[:39]:40}" + "".join(f"{served[name][stage]:10.1f}" for stage in (ALL, *STAGES)),
        )


if __name__ == "__main__":
    main()
