"""Compile jobs, each in a child process of its own, since a job may hang, crash or run out of memory.

There are two lanes with one running job each:

    quick   at most QUICK_S of processor time, in order of arrival; nearly all jobs finish in this lane
    slow    jobs that did not finish in the quick lane; one runs, on idle cores only. The others wait, oldest
            first: they are stopped (SIGSTOP), or, if too many are stopped, killed and started again later

No job is refused because it waited for long. A job waits until it can run, or until nobody wants its answer
any more (`drop`).

The model has priority: compiling may take SHARE of one core. Jobs that start while this share is used up run
on idle cores only, from the beginning.

While the quick lane is empty, the process of the next job is there already, forked and warmed: it has
compiled a small schema, so that the memory pages that every job writes to are its own. A published schema is
answered in 19 ms, against 26 ms in a process forked for it (medians).
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, GrammarFailed, GrammarReady
from ramify.errors import InvalidConstraint, RamifyError
from ramify.grammar.compile.child_limits import Usage, die_with, run_on_idle_cores, usage_of
from ramify.grammar.compile.foreign import Compiled
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.compile.stops import check_stops
from ramify.grammar.vocabulary import Vocabulary

log = logging.getLogger("ramify")

Answer = GrammarReady | GrammarFailed

QUICK_S = 0.3
SHARE = 0.1
SAVED_S = 1.0
"""Most unused processor time of SHARE, in seconds, that is saved up for later jobs."""
WALL_FACTOR = 4.0
"""A job may run for WALL_FACTOR times its limit of processor time by the clock, since a job that sleeps uses
no processor time. A job of the slow lane is not ended while it waits for a core."""
CHECK_S = 0.05
MAX_STOPPED = 16
"""Most jobs that are stopped at a time; each keeps the memory that it has allocated. Further jobs are killed
and started again later, which loses at most QUICK_S of work each."""

SIMPLIFY = "Simplify it: fewer or smaller repetitions, shorter enumerations, less nesting."

_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(CompileGrammar)
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(GrammarReady | GrammarFailed)


@dataclasses.dataclass(eq=False, slots=True)
class Child:
    """A job's process. `since` is the time at which the process was last continued, and `wall_s` its running
    time by the clock up to `since`."""

    job: CompileGrammar
    pid: int
    pipe: int
    since: float
    wall_s: float = 0.0
    received: bytearray = dataclasses.field(default_factory=bytearray)
    timer: asyncio.TimerHandle | None = None
    dropped: bool = False
    """Whether nobody waits for the answer any more."""

    def running_s(self) -> float:
        """Running time by the clock, without the time in which the process was stopped."""
        return self.wall_s + time.monotonic() - self.since


@dataclasses.dataclass(eq=False, slots=True)
class Spare:
    """A process without a job. It reads its job from the pipe `job`, and its answer comes by `pipe`."""

    pid: int
    pipe: int
    job: int


class CompileJobs:
    """Compile jobs. `compile_job` runs in child processes; each answer is passed to `send` on the running
    event loop. A child may take `timeout_s` of processor time. Each child first calls `enter`, which limits
    its own memory. A child that waits for its job calls `warm`, which writes to the memory that jobs write
    to. The running jobs are `quick` and `slow`. Jobs wait in `queue` for the quick lane, and for the slow
    lane in `stopped` or, without a process, in `again`."""

    def __init__(
        self,
        compile_job: Callable[[CompileGrammar], Answer],
        send: Callable[[Answer], None],
        *,
        timeout_s: float,
        enter: Callable[[], None] = lambda: None,
        warm: Callable[[], None] = lambda: None,
        quick_s: float = QUICK_S,
        max_stopped: int = MAX_STOPPED,
        usage_of: Callable[[int], Usage | None] = usage_of,
        run_on_idle_cores: Callable[[int], None] = run_on_idle_cores,
    ) -> None:
        self._compile = compile_job
        self._send = send
        self._timeout_s = timeout_s
        self._enter = enter
        self._warm = warm
        self._quick_s = min(quick_s, timeout_s)
        self._max_stopped = max_stopped
        self._usage_of = usage_of
        self._run_on_idle_cores = run_on_idle_cores
        self._loop = asyncio.get_running_loop()
        self.queue: deque[CompileGrammar] = deque()
        self.quick: Child | None = None
        self.slow: Child | None = None
        self.stopped: deque[Child] = deque()
        self.again: deque[CompileGrammar] = deque()
        self._credit_s = SAVED_S
        self._credit_at = time.monotonic()
        self._spare: Spare | None = self._fork()

    def submit(self, job: CompileGrammar) -> None:
        self.queue.append(job)
        self._next_quick()

    def drop(self, key: str) -> None:
        """Drop the job `key`, whose answer nobody waits for any more. If the job is running in the quick
        lane, it continues up to that lane's limit: most jobs finish there, and the next request finds the
        grammar on disk. In any other place the job is removed, and its process, if any, is killed."""
        if self.quick is not None and self.quick.job.key == key:
            self.quick.dropped = True
        self.queue = deque([job for job in self.queue if job.key != key])
        self.again = deque([job for job in self.again if job.key != key])
        for child in [child for child in self.stopped if child.job.key == key]:
            self.stopped.remove(child)
            self._reap(child)
        if self.slow is not None and self.slow.job.key == key:
            self._reap(self.slow)
            self.slow = None
            self._next_slow()

    def close(self) -> None:
        """Kill all children."""
        for child in (self.quick, self.slow, *self.stopped):
            if child is not None:
                self._reap(child)
        if self._spare is not None:
            os.close(self._spare.job)
            os.close(self._spare.pipe)
            os.kill(self._spare.pid, signal.SIGKILL)
            os.waitpid(self._spare.pid, 0)
        self.quick = self.slow = self._spare = None
        self.stopped.clear()
        self.queue.clear()
        self.again.clear()

    # --- lanes ------------------------------------------------------------------------------------

    def _next_quick(self) -> None:
        if self.quick is not None:
            return
        if not self.queue:
            self._spare = self._spare or self._fork()
            return
        child = self.quick = self._start(self.queue.popleft())
        now = time.monotonic()
        self._credit_s = min(SAVED_S, self._credit_s + SHARE * (now - self._credit_at))
        self._credit_at = now
        if self._credit_s <= 0.0:
            self._run_on_idle_cores(child.pid)
        self._watch(child, self._quick_s, self.end_quick_turn)

    def _watch(self, child: Child, limit_s: float, over: Callable[[Child], None]) -> None:
        """Call `over` when `child` has taken `limit_s` of processor time, or WALL_FACTOR times that by the
        clock."""
        usage, running_s = self._usage_of(child.pid), child.running_s()
        left_s = limit_s - (running_s if usage is None else usage.cpu_s)
        if usage is None or not usage.wants_core or child is not self.slow:
            left_s = min(left_s, WALL_FACTOR * limit_s - running_s)
        if left_s <= 0.0:
            over(child)
        else:
            child.timer = self._loop.call_later(max(left_s, CHECK_S), self._watch, child, limit_s, over)

    def end_quick_turn(self, child: Child) -> None:
        """Move `child`, which has reached the limit of the quick lane, to the slow lane or, if another job
        runs there, to the jobs that wait for the slow lane. If the job was dropped, or may not run any
        longer, the process of `child` is killed instead."""
        self.quick = None
        if child.dropped:
            self._reap(child)
        elif self._quick_s >= self._timeout_s:
            self._fail(child, _overrun(self._timeout_s))
        elif self.slow is None:
            self._run_on_idle_cores(child.pid)
            self._run_slow(child)
        elif len(self.stopped) < self._max_stopped:
            os.kill(child.pid, signal.SIGSTOP)
            self._run_on_idle_cores(child.pid)
            child.wall_s = child.running_s()
            self.stopped.append(child)
        else:
            self._reap(child)
            self.again.append(child.job)
        self._next_quick()

    def _run_slow(self, child: Child) -> None:
        self.slow = child
        self._watch(child, self._timeout_s, self._overran)

    def _overran(self, child: Child) -> None:
        self.slow = None
        self._fail(child, _overrun(self._timeout_s))
        self._next_slow()

    def _next_slow(self) -> None:
        if self.slow is None and self.stopped:
            child = self.stopped.popleft()
            child.since = time.monotonic()
            os.kill(child.pid, signal.SIGCONT)
            self._run_slow(child)
        elif self.slow is None and self.again:
            child = self._start(self.again.popleft())
            self._run_on_idle_cores(child.pid)
            self._run_slow(child)

    # --- children ---------------------------------------------------------------------------------

    def _start(self, job: CompileGrammar) -> Child:
        spare, self._spare = self._spare, None
        if spare is not None and os.waitpid(spare.pid, os.WNOHANG)[0]:  # it was killed while it waited
            os.close(spare.job)
            os.close(spare.pipe)
            spare = None
        spare = spare or self._fork(warm=False)
        with suppress(BrokenPipeError), open(spare.job, "wb") as pipe:  # `_read` sees that the process died
            pipe.write(_encoder.encode(job))
        os.set_blocking(spare.pipe, False)
        child = Child(job, spare.pid, spare.pipe, time.monotonic())
        self._loop.add_reader(spare.pipe, self._read, child)
        return child

    def _fork(self, *, warm: bool = True) -> Spare:
        jobs, job = os.pipe()
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(job)
            self._be_child(parent, jobs, writing, warm)
        os.close(jobs)
        os.close(writing)
        return Spare(pid, reading, job)

    def _be_child(self, parent: int, jobs: int, pipe: int, warm: bool) -> None:
        try:
            die_with(parent, self._timeout_s)
            gc.disable()  # the child lives for one job, which makes little garbage
            self._enter()
            if warm:
                self._warm()
            with open(jobs, "rb") as told:
                job = _job_decoder.decode(told.read())
            body = _encoder.encode(self._compile(job))
            while body:
                body = body[os.write(pipe, body) :]
        finally:
            os._exit(0)  # without the parent's exit handlers

    def _read(self, child: Child) -> None:
        data = os.read(child.pipe, 1 << 20)
        if data:
            child.received += data
            return
        if child is self.quick:
            self.quick = None
        elif child is self.slow:
            self.slow = None
        else:  # the child had ended before it was stopped
            self.stopped.remove(child)
        if child.received:
            self._reap(child)
            self._send(_decoder.decode(child.received))
        else:
            self._fail(
                child,
                InvalidConstraint(
                    "The compiler died of the constraint, most likely for lack of memory.", remedy=SIMPLIFY
                ),
            )
        self._next_quick()
        self._next_slow()

    def _fail(self, child: Child, error: RamifyError) -> None:
        self._reap(child)
        error.field = child.job.constraint.kind
        self._send(GrammarFailed(key=child.job.key, error=error.to_info()))

    def _reap(self, child: Child) -> None:
        if child.timer is not None:
            child.timer.cancel()
        self._loop.remove_reader(child.pipe)
        os.close(child.pipe)
        os.kill(child.pid, signal.SIGKILL)  # the process was not reaped yet, so its id is not reused
        _, _, used = os.wait4(child.pid, 0)
        self._credit_s -= used.ru_utime + used.ru_stime


def _overrun(timeout_s: float) -> InvalidConstraint:
    return InvalidConstraint(f"The constraint took more than {timeout_s:g} s to compile.", remedy=SIMPLIFY)


# --- the job itself -------------------------------------------------------------------------------------


def answer(
    job: CompileGrammar,
    vocabulary: Vocabulary,
    backend: str = "auto",
    compile_constraint: Callable[[Constraint, Vocabulary, str], Compiled] = compile_constraint,
    find: Callable[[str], GrammarReady | None] = lambda key: None,
) -> Answer:
    """Compile one constraint by `compile_constraint`, unless `find` has its grammar by its key, and check the
    stops. Every exception becomes a `GrammarFailed`."""
    error: RamifyError
    try:
        found = find(job.constraint.key)
        if found is None:
            compiled = compile_constraint(job.constraint, vocabulary, backend)
        else:
            compiled = Compiled(found.engine, found.payload, found.enforcement)
        check_stops(job.constraint, compiled, vocabulary, job.stop, job.stop_token_ids)
        return GrammarReady(key=job.key, **compiled._asdict())
    except RamifyError as refused:
        error = refused
    except MemoryError:
        error = InvalidConstraint(
            "The constraint takes more memory to compile than is allowed.",
            remedy="Simplify it: fewer or smaller repetitions, shorter enumerations.",
        )
    except RecursionError:
        error = InvalidConstraint(
            "The constraint is nested too deeply.", remedy="Put parts of it beside one another."
        )
    except Exception as unforeseen:
        log.exception("a constraint of kind %s cannot be compiled", job.constraint.kind)
        error = InvalidConstraint(
            f"The {job.constraint.kind} cannot be compiled: {unforeseen}.",
            remedy="This is a fault of Ramify's: please report it with the constraint.",
        )
    if error.field is None:
        error.field = job.constraint.kind
    return GrammarFailed(key=job.key, error=error.to_info())
