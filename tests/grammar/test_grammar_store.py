"""The grammar store without processes: waiting requests, a compiler that dies, caches."""

from __future__ import annotations

import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, DropGrammar, GrammarFailed, GrammarReady
from ramify.errors import EngineError, InvalidConstraint, Overloaded, RamifyError
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.runtime.scheduler.grammars import FAILURE_KEPT_S, GrammarStore
from tests.grammar.vocabularies import tiny

A, B, C = (constraint.choices([letter]) for letter in "abc")
BAD = constraint.regex("(")


class Compiler:
    """A fake compiler process: takes jobs, and answers when told to."""

    def __init__(self, cache_bytes: int = 1 << 20) -> None:
        self.jobs: list[CompileGrammar] = []
        self.on_disk: dict[str, GrammarReady] = {}
        self.restarts = 0
        self.now = 100.0
        self.store = GrammarStore(
            tiny(),
            find=self.on_disk.get,
            send=self._take,
            restart=self._restart,
            clock=lambda: self.now,
            cache_bytes=cache_bytes,
        )

    def _take(self, message: CompileGrammar | DropGrammar) -> None:
        if isinstance(message, CompileGrammar):
            self.jobs.append(message)
        else:
            self.jobs = [job for job in self.jobs if job.key != message.key]

    def _restart(self) -> None:
        self.restarts += 1
        self.jobs.clear()

    def answer(self) -> list[tuple[str, str]]:
        return told(self.store.deliver(answer(self.jobs.pop(0), tiny())))

    def keys(self) -> list[str]:
        return [job.key for job in self.jobs]


def told(settled: list[tuple[str, object]]) -> list[tuple[str, str]]:
    return [
        (rid, type(outcome).__name__ if isinstance(outcome, RamifyError) else "grammar")
        for rid, outcome in settled
    ]


def test_a_grammar_is_compiled_once_for_all_who_ask() -> None:
    compiler = Compiler()
    assert compiler.store.request("1", A) is None
    assert compiler.store.request("2", A) is None
    assert compiler.keys() == [A.key]
    assert compiler.store.waiting == 2
    assert compiler.answer() == [("1", "grammar"), ("2", "grammar")]
    assert compiler.store.waiting == 0
    assert compiler.store.request("3", A) is compiler.store.request(
        "4", Constraint(kind=A.kind, source=A.source)
    )
    assert compiler.keys() == []


def test_jobs_are_sent_at_once_and_answered_in_any_order() -> None:
    compiler = Compiler()
    for rid, wanted in (("1", A), ("2", B), ("3", C)):
        compiler.store.request(rid, wanted)
    assert compiler.keys() == [A.key, B.key, C.key]
    compiler.jobs.reverse()
    assert [compiler.answer() for _ in range(3)] == [[(rid, "grammar")] for rid in "321"]


def test_a_failure_reaches_its_requests_and_is_kept_for_a_while() -> None:
    compiler = Compiler()
    compiler.store.request("1", BAD)
    assert compiler.answer() == [("1", "InvalidConstraint")]
    assert isinstance(compiler.store.request("2", BAD), InvalidConstraint)
    assert compiler.keys() == []
    compiler.now += FAILURE_KEPT_S
    assert compiler.store.request("3", BAD) is None
    assert compiler.keys() == [BAD.key]


def test_a_busy_compiler_may_be_asked_again_at_once() -> None:
    compiler = Compiler()
    compiler.store.request("1", A)
    busy = GrammarFailed(key=A.key, error=Overloaded("Too many.", retry_after=1.0).to_info())
    assert told(compiler.store.deliver(busy)) == [("1", "Overloaded")]
    assert compiler.store.request("2", A) is None


def test_an_answer_that_nobody_waits_for_is_kept() -> None:
    compiler = Compiler()
    compiler.store.request("1", A)
    on_its_way = answer(compiler.jobs[0], tiny())
    compiler.store.forget("1")
    assert compiler.store.deliver(on_its_way) == []
    assert compiler.store.request("2", A) is not None


def test_a_job_is_dropped_with_the_last_request_that_waits_for_it() -> None:
    compiler = Compiler()
    for rid in "12":
        compiler.store.request(rid, A)
    compiler.store.forget("1")
    assert compiler.keys() == [A.key]
    compiler.store.forget("2")
    assert compiler.keys() == []
    assert compiler.store.request("3", A) is None
    assert compiler.answer() == [("3", "grammar")]


def test_a_compiler_that_dies_is_given_its_jobs_again_once() -> None:
    compiler = Compiler()
    for rid, wanted in (("1", A), ("2", B)):
        compiler.store.request(rid, wanted)
    assert compiler.store.compiler_died() == []
    assert (compiler.restarts, compiler.keys()) == (1, [A.key, B.key])
    assert compiler.answer() == [("1", "grammar")]
    compiler.store.request("3", C)
    assert told(compiler.store.compiler_died()) == [("2", "EngineError")]
    assert (compiler.restarts, compiler.keys()) == (2, [C.key])
    assert compiler.answer() == [("3", "grammar")]


def test_a_compiler_that_dies_idle_is_started_again_when_it_is_needed() -> None:
    compiler = Compiler()
    assert compiler.store.compiler_died() == []
    assert compiler.restarts == 0
    compiler.store.request("1", A)
    assert (compiler.restarts, compiler.keys()) == (1, [A.key])


def test_aborted_requests_get_nothing() -> None:
    compiler = Compiler()
    for rid, wanted in (("1", A), ("2", A), ("3", B)):
        compiler.store.request(rid, wanted)
    compiler.store.forget("1")
    compiler.store.forget("3")
    compiler.store.forget("unknown")
    assert compiler.answer() == [("2", "grammar")]
    assert compiler.keys() == []
    assert compiler.store.waiting == 0


def test_the_cache_is_bounded_by_bytes_least_recently_used_first() -> None:
    compiler = Compiler()
    compiler.store.request("1", A)
    compiler.answer()
    grammar = compiler.store.request("1", A)
    assert grammar is not None
    assert not isinstance(grammar, RamifyError)
    compiler = Compiler(cache_bytes=2 * grammar.nbytes)
    for wanted in (A, B):
        compiler.store.request("x", wanted)
        compiler.answer()
    compiler.store.request("y", A)
    compiler.store.request("x", C)
    compiler.answer()
    assert compiler.store.request("y", A) is not None
    assert compiler.store.request("y", C) is not None
    assert compiler.store.request("y", B) is None


def test_a_grammar_that_is_delivered_twice_counts_once() -> None:
    compiler = Compiler()
    compiler.store.request("1", A)
    message = answer(compiler.jobs.pop(0), tiny())
    compiler.store.deliver(message)
    grammar = compiler.store.request("1", A)
    assert grammar is not None
    assert not isinstance(grammar, RamifyError)
    compiler = Compiler(cache_bytes=2 * grammar.nbytes)
    for _ in range(3):
        compiler.store.deliver(message)
    compiler.store.request("1", B)
    compiler.answer()
    assert compiler.store.request("2", A) is not None
    assert compiler.store.request("2", B) is not None


@pytest.mark.parametrize("engine", ["pushdown", "llguidance", "unheard of"])
def test_a_payload_that_cannot_be_read_costs_its_own_requests(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler()
    compiler.store.request("1", A)
    compiler.store.request("2", B)
    settled = compiler.store.deliver(GrammarReady(key=A.key, engine=engine, payload=b"\xff{"))
    assert [rid for rid, _ in settled] == ["1"]
    assert isinstance(settled[0][1], EngineError)
    assert "cannot be read" in caplog.text
    compiler.jobs.pop(0)
    assert compiler.answer() == [("2", "grammar")]


def test_an_error_keeps_its_pointer_over_the_wire() -> None:
    compiler = Compiler()
    compiler.store.request("1", constraint.json_schema({"type": "array", "minItems": 10**9}))
    message = answer(compiler.jobs.pop(0), tiny(), "ramify")
    assert isinstance(message, GrammarFailed)
    [(_, error)] = compiler.store.deliver(message)
    assert isinstance(error, InvalidConstraint)
    assert (error.field, error.pointer) == ("json_schema", "/minItems")
    assert error.remedy


def test_a_grammar_on_disk_needs_no_compiler() -> None:
    compiler = Compiler()
    ready = answer(CompileGrammar(key=A.key, constraint=A), tiny())
    assert isinstance(ready, GrammarReady)
    compiler.on_disk[A.key] = ready
    assert isinstance(compiler.store.request("one", A), PushdownGrammar)
    assert compiler.store.request("two", B) is None
    assert [job.key for job in compiler.jobs] == [B.key]
    compiler.on_disk[C.key] = GrammarReady(key=C.key, engine="pushdown", payload=b"torn")
    assert isinstance(compiler.store.request("three", C), EngineError)
