"""The phases of a request: it waits for its grammar, waits in the queue, computes its prompt, generates."""

from __future__ import annotations

from typing import Any

import pytest

from ramify import constraint
from ramify.engine_messages import Abort
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Usage
from ramify.runtime.scheduler.grammars import GrammarStore
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import END_ID, VOCAB

STEP_S = 0.25


class Timed:
    """A scheduler whose clock is advanced by `wait`, and by `STEP_S` in each forward pass."""

    def __init__(self, model: Any) -> None:
        self.now = 100.0
        self.jobs: list[Any] = []
        tokens = tuple(bytes([i]) for i in range(256)) + (b"",) * (VOCAB - 256)
        self.vocabulary = Vocabulary(tokens, (END_ID,))
        store = GrammarStore(self.vocabulary, send=self.jobs.append, restart=lambda: None)
        self.local = LocalScheduler(
            model, clock=lambda: self.now, grammars=store, speculation=False, overlap=False
        )
        self.local.runner.before_pass = lambda batch: self.wait(STEP_S)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def compile(self) -> None:
        self.local.scheduler.receive(answer(self.jobs.pop(), self.vocabulary))

    def usage(self, rid: str) -> Usage:
        usage = self.local.results[rid].usage
        assert usage is not None
        return usage


@pytest.fixture
def timed(tiny_model: Any) -> Timed:
    return Timed(tiny_model)


def test_the_phases_of_a_request_with_a_grammar(timed: Timed) -> None:
    rid = timed.local.submit(b"ab", constraint=constraint.regex("[ab]{3}[0-9]"), max_tokens=8)
    timed.wait(2.0)
    timed.compile()
    timed.wait(1.0)
    timed.local.run()
    usage = timed.usage(rid)
    phases = usage.phases
    assert phases is not None
    assert phases == {
        "grammar_s": 2.0,
        "queue_s": 1.0,
        "prefill_s": STEP_S,
        "decode_s": (usage.completion_tokens - usage.forced_tokens - 1) * STEP_S,
    }
    assert sum(phases.values()) == usage.total_s


def test_a_grammar_that_is_known_is_not_waited_for(timed: Timed) -> None:
    for waits in (True, False):
        rid = timed.local.submit(b"ab", constraint=constraint.regex("[ab]{2}"), max_tokens=8)
        timed.wait(2.0)
        if waits:
            timed.compile()
        timed.local.run()
        usage = timed.usage(rid)
        assert (usage.grammar_s, usage.queue_s) == ((2.0, 0.0) if waits else (0.0, 2.0))


@pytest.mark.parametrize("compiles", [True, False])
def test_a_request_that_is_aborted_while_it_waits(timed: Timed, compiles: bool) -> None:
    rid = timed.local.submit(b"ab", constraint=constraint.regex("[ab]{2}") if compiles else None)
    timed.wait(3.0)
    timed.local.scheduler.receive(Abort(rid=rid, silent=False))
    timed.local.run()
    waited = {"grammar_s": 3.0, "queue_s": 0.0} if compiles else {"grammar_s": 0.0, "queue_s": 3.0}
    assert timed.usage(rid).phases == {**waited, "prefill_s": 0.0, "decode_s": 0.0}


def test_a_request_that_generates_nothing_has_no_decode(timed: Timed) -> None:
    rid = timed.local.submit(b"abcd", max_tokens=0)
    timed.wait(1.0)
    timed.local.run()
    phases = timed.usage(rid).phases
    assert phases == {"grammar_s": 0.0, "queue_s": 1.0, "prefill_s": STEP_S, "decode_s": 0.0}


def test_a_backend_without_times_has_no_phases() -> None:
    assert Usage(prompt_tokens=3).phases is None
