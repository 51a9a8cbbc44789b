"""Published schemas on Ramify and other engines, in one run: refusals, wrong verdicts, and times.

``python -m benchmarks.schemas [--sample 100] [--engines ramify,llguidance] [--limit 5] [--detail]``.
Instances are fed token by token, with the default model's tokenizer. Every engine runs in a process of its
own, in one thread. The process is killed if a schema takes longer than the limit. Times are processor times,
which other work on the machine lengthens only little.

"exact": every valid instance is accepted and every invalid one is rejected. "order": this holds only if the
properties of the valid instances are written in the schema's order. Mask times are those of the first valid
instance, in states that no request has met yet, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.grammar import ENGINES, Engine, XGrammar, percentile
from ramify.grammar.matcher import mask_words
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer, load_vocabulary
from tests.grammar.collection.cases import Case, real_world, written
from tests.grammar.schema_order import in_schema_order

MEMORY = 8 << 30
"""Bytes of address space that each engine may use."""
MASKS = 300
"""Most masks that are timed for each schema."""

LIBRARIES: dict[str, Callable[[Vocabulary], Engine]] = {
    **ENGINES,
    "xgrammar": partial(XGrammar, strict_mode=False),
    "xgrammar closed": XGrammar,
}
"""Name → engine. XGrammar's default is "xgrammar closed": it closes objects that the schema leaves open."""


class Task(NamedTuple):
    """A schema, and token ids of its instances: of the valid ones in their own order, of the valid ones in
    the schema's order, and of the invalid ones."""

    schema: Any
    own_order: list[list[int]]
    valid: list[list[int]]
    invalid: list[list[int]]


class Outcome(NamedTuple):
    compile_ms: float = 0.0
    refused: str = ""
    own_order_rejected: int = 0
    valid_rejected: int = 0
    invalid_accepted: int = 0
    masks: Sequence[float] = ()
    slow: bool = False

    @property
    def verdict(self) -> str:
        if self.refused:
            return "slow" if self.slow else "refused"
        if self.invalid_accepted:
            return "invalid accepted"
        if self.valid_rejected:
            return "valid rejected"
        return "order" if self.own_order_rejected else "exact"


def work(library: str, pipe: Connection) -> None:
    """Answer each `Task` with the seconds to compile its schema, then an `Outcome`; or with the refusal."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    vocabulary = load_vocabulary(resolve(DEFAULT_MODEL).tokenizer, vocab_size=49_152, stop_ids=[2])
    engine = LIBRARIES[library](vocabulary)
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    pipe.send("ready")
    while True:
        task: Task = pipe.recv()
        began = time.process_time()
        try:
            begin = engine.compile(task.schema)
        except Exception as error:
            pipe.send(str(error).splitlines()[0] if str(error) else type(error).__name__)
            continue
        elapsed = time.process_time() - began
        pipe.send(elapsed)

        def accepts(text: list[int], begin: Any = begin) -> bool:
            accept = begin()[1]
            return all(map(accept, text)) and accept(vocabulary.stop_ids[0])

        masks: list[float] = []
        if task.valid:
            fill, accept = begin()
            for token in task.valid[0][:MASKS]:
                began = time.thread_time_ns()
                fill(row)
                masks.append((time.thread_time_ns() - began) / 1e3)
                if not accept(token):
                    break
        wrong = [sum(not accepts(text) for text in texts) for texts in (task.own_order, task.valid)]
        pipe.send(Outcome(elapsed * 1e3, "", *wrong, sum(map(accepts, task.invalid)), masks))


def in_order(_library: str, pipe: Connection) -> None:
    """Answer each (schema, values) with 0.0, and then with the values as texts in the schema's order, or with
    the reason why there are none."""
    pipe.send("ready")
    while True:
        schema, values = pipe.recv()
        pipe.send(0.0)
        try:
            pipe.send([in_schema_order(schema, value) for value in values])
        except Exception as error:
            pipe.send(str(error))


class Worker:
    """A process that can be killed and started again. It runs `target` with a library."""

    def __init__(self, target: Callable[..., None], library: str = "") -> None:
        self._target, self._library = target, library
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._target, args=(self._library, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def _answer(self, limit_s: float) -> Any:
        """The next answer. Raises `TimeoutError` if it takes more than `limit_s` of processor time, and
        `EOFError` after a crash."""
        end = self._used() + limit_s
        while not self._pipe.poll(0.05):
            if self._used() > end:
                raise TimeoutError(f"takes more than {limit_s:g} s")
        return self._pipe.recv()

    def _used(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def outcome(self, task: Any, limit_s: float) -> Any:
        """The answer of `work` or `in_order` to `task`; an `Outcome` with the reason if the answer takes
        longer than the limit, or if the process crashes or refuses."""
        self._pipe.send(task)
        try:
            seconds = self._answer(limit_s)
            return Outcome(refused=seconds) if isinstance(seconds, str) else self._answer(10 * limit_s)
        except (TimeoutError, EOFError, OSError) as error:
            self.close()
            self._start()
            return Outcome(limit_s * 1e3, str(error) or "crashed", slow=True)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def tasks(cases: Sequence[Case], limit_s: float) -> list[Task]:
    """The tasks of `cases`. If the schema's order is not found in time, the instances' own order is used."""
    tokenizer = load_tokenizer(resolve(DEFAULT_MODEL).tokenizer)
    worker = Worker(in_order)
    found = []
    for case in cases:
        valid, invalid = case.instances
        own = [json.dumps(value, ensure_ascii=False) for value in (*valid, *invalid)]
        ordered = worker.outcome((case.schema, [*valid, *invalid]), limit_s)
        texts = ordered if isinstance(ordered, list) else own
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (*own[: len(valid)], *texts)]
        found.append(
            Task(case.schema, ids[: len(valid)], ids[len(valid) : 2 * len(valid)], ids[2 * len(valid) :])
        )
    worker.close()
    return found


VERDICTS = ("exact", "order", "valid rejected", "invalid accepted", "refused", "slow")


def show(library: str, given: list[Task], outcomes: list[Outcome]) -> None:
    served = [(task, found) for task, found in zip(given, outcomes, strict=True) if not found.refused]
    counts = Counter(found.verdict for found in outcomes)
    times = [found.compile_ms for _, found in served] or [0.0]
    masks = [mask for _, found in served for mask in found.masks] or [0.0]
    rejected, accepted, own = (
        sum(getattr(found, name) for _, found in served)
        for name in ("valid_rejected", "invalid_accepted", "own_order_rejected")
    )
    valid, invalid = (sum(len(getattr(task, name)) for task, _ in served) for name in ("valid", "invalid"))
    print(
        f"{library:16}"
        + "".join(f"{counts[verdict]:9}" for verdict in VERDICTS)
        + f"{rejected:7} ({own}) of {valid}{accepted:7} of {invalid}"
        + "".join(f"{percentile(times, share):9.1f}" for share in (0.5, 0.95, 1))
        + "".join(f"{percentile(masks, share):9.1f}" for share in (0.5, 0.99)),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", default="ramify,llguidance,xgrammar,xgrammar closed,outlines")
    parser.add_argument("--sample", type=int, help="a number of schemas, chosen by a fixed seed")
    parser.add_argument("--written", action="store_true", help="the schemas written for the tests instead")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds to compile one schema")
    parser.add_argument("--detail", action="store_true", help="every schema that is not exact")
    arguments = parser.parse_args()
    cases: list[Case] = written() if arguments.written else real_world()
    if arguments.sample:
        cases = Random(0).sample(cases, min(arguments.sample, len(cases)))
    given = tasks(cases, arguments.limit)
    instances = [sum(len(getattr(task, name)) for task in given) for name in ("valid", "invalid")]
    print(f"{len(cases)} schemas, {instances[0]} valid and {instances[1]} invalid instances")
    print(f"{'':16}{'exact':>9}{'order':>9}{'valid':>9}{'invalid':>9}{'refused':>9}{'slow':>9}", end="")
    print("  valid rejected (own order), invalid accepted, compile ms p50, p95, max, mask us p50, p99")
    for library in arguments.engines.split(","):
        worker = Worker(work, library)
        outcomes = [worker.outcome(task, arguments.limit) for task in given]
        worker.close()
        show(library, given, outcomes)
        for case, found in zip(cases, outcomes, strict=True):
            if arguments.detail and found.verdict != "exact":
                print(f"    {case}: {found._replace(masks=())}")


if __name__ == "__main__":
    main()
