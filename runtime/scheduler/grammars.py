"""The scheduler's side of grammar compilation: compiled grammars, open jobs, and the requests that wait.

Grammars are compiled in another process, which answers every job within limits of time and memory. A grammar
that is on disk is read here (0.2 ms), without waiting for the compiler's process to start. The grammar
engines are imported with the first grammar, because the import takes 0.1 s.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, CompilerDied, DropGrammar, GrammarFailed, GrammarReady
from ramify.errors import EngineError, InvalidRequest, RamifyError, from_info
from ramify.grammar.matcher import Grammar, Matcher
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Preamble
from ramify.runtime.processes.ipc import Outbox, Sockets
from ramify.runtime.processes.worker_process import Orders, spawn

log = logging.getLogger("ramify")


Outcomes = list[tuple[str, Grammar | RamifyError]]
"""The ids of requests that waited for a grammar, each with the grammar or the error."""

FAILURE_KEPT_S = 60.0
"""Seconds for which the error of a refused constraint is remembered, so that the constraint is not compiled
again."""
MAX_REMEMBERED = 1024
"""Most errors, and most lists of checked stops, that are remembered."""

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Job:
    order: CompileGrammar
    waiting: list[str]
    sent: int = 1


class GrammarStore:
    """An LRU cache of compiled grammars by the key of their constraint, the stops that were checked against
    them, and the open compile jobs.

    `find` reads the grammar of a key from disk; None if no file has it. `send` passes a job to the compiler's
    process, and `restart` starts a new compiler's process. The cache holds at most `cache_bytes`. A grammar
    that is in use stays alive in its matchers even when the cache drops it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        send: Callable[[CompileGrammar | DropGrammar], None],
        restart: Callable[[], None],
        find: Callable[[str], GrammarReady | None] = lambda key: None,
        clock: Callable[[], float] = time.monotonic,
        cache_bytes: int = 256 << 20,
    ) -> None:
        self._vocabulary = vocabulary
        self._find = find
        self._send = send
        self._restart = restart
        self._clock = clock
        self._cache_bytes = cache_bytes
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._held_bytes = 0
        self._checked: dict[str, None] = {}
        """Keys of jobs with stop strings or stop tokens that their constraint takes; at most
        `MAX_REMEMBERED`."""
        self._failures: dict[str, tuple[float, RamifyError]] = {}
        self._jobs: dict[str, _Job] = {}
        """Jobs that the process has not answered, by key."""
        self._process_missing = False

    def request(
        self,
        rid: str,
        constraint: Constraint,
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> Grammar | RamifyError | None:
        """The grammar or the error of `constraint` beside the stop strings and stop tokens, if known. None
        otherwise: then `rid` waits until `deliver` or `compiler_died` returns the outcome."""
        key = own = constraint.key
        if stop or stop_token_ids:
            key += f" {sorted(set(stop))} {sorted(set(stop_token_ids))}"
        checked = key == own or key in self._checked
        grammar = self._grammars.get(own)
        if checked and grammar is not None:
            self._grammars.move_to_end(own)
            return grammar
        failure = self._recent_failure(key)
        if failure is not None:
            return failure
        job = self._jobs.get(key)
        if job is not None:
            job.waiting.append(rid)
            return None
        found = self._find(own) if checked else None
        if found is not None:
            return self._load(found)
        if self._process_missing:
            self._process_missing = False
            self._restart()
        order = CompileGrammar(key=key, constraint=constraint, stop=stop, stop_token_ids=stop_token_ids)
        self._jobs[key] = _Job(order, [rid])
        self._send(order)
        return None

    def deliver(self, message: GrammarReady | GrammarFailed) -> Outcomes:
        """Take an answer of the compiler's process. Returns the ids of the requests that waited for the
        grammar, each with the outcome. A grammar is kept even if no request waits for it any more."""
        outcome: Grammar | RamifyError
        if isinstance(message, GrammarFailed):
            outcome = from_info(message.error)
            # A refusal is final; a job that failed because the compiler was overloaded may succeed later.
            if isinstance(outcome, InvalidRequest):
                self._remember_failure(message.key, outcome)
        else:
            outcome = self._load(message)
            if message.key != message.constraint_key:
                _remember(self._checked, message.key, None)
        return self._close_job(message.key, outcome)

    def _load(self, message: GrammarReady) -> Grammar | EngineError:
        from ramify.grammar.engine.load import load_grammar

        known = self._grammars.get(message.constraint_key)
        if known is not None:
            return known
        try:
            grammar = load_grammar(message.engine, message.payload, message.enforcement, self._vocabulary)
        except Exception as error:  # an unreadable payload fails only its own requests
            log.exception("a compiled grammar cannot be read")
            return EngineError(f"The compiled grammar cannot be read: {error}")
        self._keep(message.constraint_key, grammar)
        return grammar

    def matcher(
        self, grammar: Grammar | None, preambles: Sequence[Preamble] = (), prefix: bytes = b""
    ) -> Matcher:
        """A matcher for one request: `preambles`, then `grammar`, or free text if `grammar` is None. The
        first tokens that the matcher reads must spell `prefix`: the end of the prompt, if it is healed."""
        from ramify.grammar.engine.controls import with_controls
        from ramify.grammar.engine.thinking import FreeGrammar, with_preambles

        chosen = FreeGrammar(self._vocabulary) if grammar is None else grammar
        answer = chosen.matcher(prefix) if prefix else chosen.matcher()
        answer = with_controls(answer, self._vocabulary)
        return with_preambles(answer, preambles, self._vocabulary) if preambles else answer

    def forget(self, rid: str) -> None:
        """Remove `rid` from the requests that wait for its grammar. If no other request waits for that
        grammar, drop its compile job."""
        for key, job in self._jobs.items():
            if rid in job.waiting:
                job.waiting.remove(rid)
                if not job.waiting:
                    del self._jobs[key]
                    self._send(DropGrammar(key=key))
                return

    def compiler_died(self) -> Outcomes:
        """Handle the death of the compiler's process: start a new one, and send it all open jobs.

        A job fails when a second process has died while the job was open. Returns the ids of the requests
        that waited for failed jobs, each with the error. If no job is left, a new process is started only for
        the next job. So a process that cannot start is not restarted for ever.
        """
        if not self._jobs:
            self._process_missing = True
            return []
        outcomes: Outcomes = []
        for key in [key for key, job in self._jobs.items() if job.sent > 1]:
            outcomes += self._close_job(
                key, EngineError("The grammar compiler died twice over this constraint.")
            )
        if not self._jobs:
            self._process_missing = True
            return outcomes
        self._restart()
        for job in self._jobs.values():
            job.sent += 1
            self._send(job.order)
        return outcomes

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a grammar."""
        return sum(len(job.waiting) for job in self._jobs.values())

    def _close_job(self, key: str, outcome: Grammar | RamifyError) -> Outcomes:
        job = self._jobs.pop(key, None)
        return [(rid, outcome) for rid in job.waiting] if job is not None else []

    def _remember_failure(self, key: str, error: RamifyError) -> None:
        _remember(self._failures, key, (self._clock() + FAILURE_KEPT_S, error))

    def _keep(self, key: str, grammar: Grammar) -> None:
        self._grammars[key] = grammar
        self._held_bytes += grammar.nbytes
        while self._held_bytes > self._cache_bytes and self._grammars:
            _, dropped = self._grammars.popitem(last=False)
            self._held_bytes -= dropped.nbytes

    def _recent_failure(self, key: str) -> RamifyError | None:
        known = self._failures.get(key)
        if known is None:
            return None
        until, error = known
        if self._clock() < until:
            return error
        del self._failures[key]
        return None


def _remember(known: dict[str, T], key: str, value: T) -> None:
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]


class CompilerHost:
    """Starts compiler processes, one at a time. `generation` is the number of processes started so far;
    `CompilerDied.generation` tells which of them has died."""

    def __init__(self, orders: Orders, sockets: Sockets, vocabulary: Vocabulary) -> None:
        self._orders = orders
        self._sockets = sockets
        self._vocabulary = [str(vocabulary.size), ",".join(map(str, vocabulary.stop_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self.generation = 0

    def start(self) -> None:
        self.generation += 1
        # Each process has a socket of its own, so that a new one does not read the messages to a dead one.
        path = self._sockets.compiler(self.generation)
        self._process = spawn(
            "processes.grammar_compiler",
            self._orders,
            dict(os.environ),
            arguments=[str(path), *self._vocabulary],
            own_session=False,
        )
        self._outbox = Outbox(path)
        threading.Thread(
            target=self._announce_death, args=(self._process, self.generation), daemon=True
        ).start()

    def send(self, message: CompileGrammar | DropGrammar) -> None:
        if self._outbox is None:
            self.start()
        assert self._outbox is not None
        self._outbox.send(message)

    def restart(self) -> None:
        """Kill the process, whatever it is doing, and start another."""
        if self._process is not None:
            self._process.kill()
        if self._outbox is not None:
            self._outbox.close()
        self.start()

    def _announce_death(self, process: subprocess.Popen[bytes], generation: int) -> None:
        process.wait()
        # A ZeroMQ socket belongs to one thread, so this thread opens its own.
        outbox = Outbox(self._sockets.scheduler)
        outbox.send(CompilerDied(generation=generation))
        outbox.close(linger_s=1.0)
