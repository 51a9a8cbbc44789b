"""Compile jobs in real child processes: limits, lanes, crashes. The source of a job says how it behaves."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, GrammarFailed, GrammarReady
from ramify.grammar.compile.child_jobs import Answer, CompileJobs, answer
from ramify.grammar.compile.child_limits import (
    IDLE,
    Usage,
    die_with,
    limit_memory,
    run_on_idle_cores,
    usage_of,
)
from ramify.grammar.compile.foreign import Compiled
from ramify.grammar.compile.grammar_files import GrammarFiles
from ramify.grammar.engine.load import load_grammar
from ramify.loop import wait
from tests.grammar.vocabularies import accepts, tiny

pytestmark = pytest.mark.slow

EXPONENTIAL = constraint.regex("(a|b)*a(a|b){26}")
"""Its deterministic automaton has more than 100 million states."""


def job_of(wanted: Constraint) -> CompileGrammar:
    return CompileGrammar(key=wanted.key, constraint=wanted)


def compile_really(job: CompileGrammar) -> Answer:
    return answer(job, tiny())


def behave(job: CompileGrammar) -> Answer:
    """Do what the constraint's source says."""
    match job.constraint.source:
        case "hang":
            while True:
                time.sleep(1)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
    return GrammarReady(key=job.key, engine=job.constraint.source, payload=str(os.getpid()).encode())


def told(job: str) -> CompileGrammar:
    return CompileGrammar(key=job, constraint=Constraint(kind="regex", source=job.rstrip("0123456789")))


def compile_jobs(
    compile_job: Callable[[CompileGrammar], Answer], take: Callable[[Answer], None], **options: Any
) -> CompileJobs:
    """Compile jobs that keep their priority: on idle cores alone they would wait for other tests."""
    options = {"timeout_s": 30.0, "run_on_idle_cores": lambda pid: None} | options
    return CompileJobs(compile_job, take, **options)


async def run(
    jobs: list[CompileGrammar],
    compile_job: Callable[[CompileGrammar], Answer],
    *,
    first: int | None = None,
    **options: Any,
) -> list[Answer]:
    """The `first` answers (all, unless told) in the order in which they come."""
    answers: list[Answer] = []
    all_there = asyncio.Event()

    def take(outcome: Answer) -> None:
        answers.append(outcome)
        if len(answers) == (first or len(jobs)):
            all_there.set()

    runner = compile_jobs(compile_job, take, **options)
    try:
        for job in jobs:
            runner.submit(job)
        await asyncio.wait_for(all_there.wait(), 60)
    finally:
        runner.close()
    return answers


def test_it_answers_good_and_bad() -> None:
    good = constraint.choices(["日本", "x"])
    bad = constraint.json_schema({"type": "objekt"})
    first, second = wait(run([job_of(good), job_of(bad)], compile_really))
    assert isinstance(first, GrammarReady)
    assert first.key == good.key
    assert accepts(load_grammar(first.engine, first.payload, first.enforcement, tiny()), "日本")
    assert isinstance(second, GrammarFailed)
    assert second.error.pointer == "/type"


def test_too_much_memory_ends_the_job_alone() -> None:
    jobs = [job_of(EXPONENTIAL), job_of(constraint.choices(["a"]))]
    answers = wait(run(jobs, compile_really, enter=lambda: limit_memory(256 << 20)))
    by_key = {outcome.key: outcome for outcome in answers}
    assert isinstance(by_key[EXPONENTIAL.key], GrammarFailed)
    assert isinstance(by_key[jobs[1].key], GrammarReady)


def test_a_crash_ends_the_job_alone() -> None:
    crashed, fine = wait(run([told("crash"), told("fine")], behave))
    assert isinstance(crashed, GrammarFailed)
    assert crashed.error.field == "regex"
    assert isinstance(fine, GrammarReady)


def test_jobs_that_hang_delay_nobody() -> None:
    jobs = [told("hang1"), told("hang2"), *(told(f"fine{i}") for i in range(5))]
    answers = wait(run(jobs, behave, first=5, quick_s=0.02))
    assert sorted(outcome.key for outcome in answers) == [f"fine{i}" for i in range(5)]


def test_jobs_that_hang_end() -> None:
    for outcome in wait(run([told("hang1"), told("hang2")], behave, timeout_s=0.5, quick_s=0.02)):
        assert isinstance(outcome, GrammarFailed)
        assert "0.5 s" in outcome.error.message


def leave_quick_lane(runner: CompileJobs) -> str:
    """The running job, which has now used up the time of the quick lane."""
    child = runner.quick
    assert child is not None
    assert child.timer is not None
    child.timer.cancel()  # else it comes later, and closes a file descriptor of another test
    runner.end_quick_turn(child)
    return child.job.key


async def _end_while_stopped() -> tuple[list[str], str]:
    answers: list[str] = []
    runner = compile_jobs(behave, lambda outcome: answers.append(outcome.key))
    try:
        runner.submit(told("hang"))
        leave_quick_lane(runner)
        runner.submit(told("fine"))
        assert runner.quick is not None
        os.waitid(os.P_PID, runner.quick.pid, os.WEXITED | os.WNOWAIT)
        leave_quick_lane(runner)
        while not answers:
            await asyncio.sleep(0.01)
        assert runner.slow is not None
        return answers, runner.slow.job.key
    finally:
        runner.close()


def test_a_job_that_ends_as_it_is_stopped_is_answered_once() -> None:
    assert wait(_end_while_stopped()) == (["fine"], "hang")


def test_long_jobs_take_turns_and_all_end() -> None:
    on_idle_cores: list[int] = []
    jobs = [told(f"spin{i}") for i in range(4)]
    answers = wait(run(jobs, behave, quick_s=0.02, run_on_idle_cores=on_idle_cores.append))
    ended = {int(outcome.payload) for outcome in answers if isinstance(outcome, GrammarReady)}
    assert len(ended) == 4
    assert ended == set(on_idle_cores)


def test_long_jobs_wait_without_a_process_where_too_many_are_stopped() -> None:
    jobs = [told(f"spin{i}") for i in range(6)]
    answers = wait(run(jobs, behave, quick_s=0.02, max_stopped=1))
    assert sorted(outcome.key for outcome in answers) == [f"spin{i}" for i in range(6)]
    assert all(isinstance(outcome, GrammarReady) for outcome in answers)


async def _dropped() -> list[str]:
    """Six jobs that hang, one in each place, and then one that ends."""
    answers: list[str] = []
    runner = compile_jobs(behave, lambda outcome: answers.append(outcome.key), max_stopped=1)
    try:
        for job in ("hang1", "hang2", "hang3"):
            runner.submit(told(job))
            leave_quick_lane(runner)
        for job in ("hang4", "hang5", "hang6", "fine"):
            runner.submit(told(job))
        assert runner.slow is not None
        assert [runner.slow.job.key, *(child.job.key for child in runner.stopped)] == ["hang1", "hang2"]
        assert [job.key for job in runner.again] == ["hang3"]
        for job in ("hang6", "hang4", "hang2", "hang1", "unknown"):
            runner.drop(job)
        assert runner.slow.job.key == "hang3"
        for job in ("hang4", "hang5"):
            assert leave_quick_lane(runner) == job
        while not answers:
            await asyncio.sleep(0.01)
        runner.drop("hang3")
        assert runner.slow.job.key == "hang5"
        assert not [*runner.stopped, *runner.queue, *runner.again]
        return answers
    finally:
        runner.close()


def test_a_job_that_nobody_waits_for_is_dropped_wherever_it_is() -> None:
    assert wait(_dropped()) == ["fine"]


async def _starved() -> None:
    answers: list[Answer] = []
    wants_core = True
    asked = asyncio.Semaphore(0)

    def usage(pid: int) -> Usage:
        asked.release()
        return Usage(0.2, wants_core)

    runner = compile_jobs(behave, answers.append, timeout_s=1.0, usage_of=usage)
    try:
        runner.submit(told("hang"))
        leave_quick_lane(runner)
        assert runner.slow is not None
        runner.slow.wall_s = 1e6
        for _ in range(4):
            await asked.acquire()
        assert not answers
        wants_core = False
        while not answers:
            await asked.acquire()
    finally:
        runner.close()


def test_a_job_that_gets_no_core_is_not_refused_for_taking_long() -> None:
    wait(_starved())


def test_children_end_with_their_parent() -> None:
    """The kernel ends the children of a compiler process that was killed."""
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            os.close(reading)

            async def forever() -> None:
                runner = compile_jobs(behave, lambda _: None, timeout_s=60)
                runner.submit(told("hang"))
                await asyncio.sleep(60)

            asyncio.run(asyncio.wait_for(_then_kill(forever()), 60))
        finally:
            os._exit(1)
    os.close(writing)
    os.waitpid(parent, 0)
    assert os.read(reading, 1) == b"", "the child still holds its end of the pipe"
    os.close(reading)


def test_constraints_compile_without_what_linux_alone_has(tmp_path: Path) -> None:
    """Elsewhere there is no /proc, no SCHED_IDLE and no signal at a parent's death."""
    assert usage_of(os.getpid(), tmp_path / "proc") is None
    jobs = [job_of(constraint.choices(["a"]))]
    (good,) = wait(run(jobs, compile_really, enter=lambda: limit_memory(256 << 20, tmp_path / "statm")))
    assert isinstance(good, GrammarReady)
    jobs = [told("hang"), told("spin"), told("fine")]
    answers = wait(run(jobs, behave, timeout_s=2.0, quick_s=0.02, usage_of=lambda pid: None))
    ended = {outcome.key: isinstance(outcome, GrammarReady) for outcome in answers}
    assert ended == {"hang": False, "spin": True, "fine": True}


@pytest.mark.parametrize("policy", sorted({None, IDLE}, key=str))
def test_a_long_job_waits_for_idle_cores_or_has_the_lowest_priority(policy: int | None) -> None:
    child = os.fork()
    if child == 0:
        try:
            signal.pause()
        finally:
            os._exit(0)
    try:
        run_on_idle_cores(child, policy)
        if policy is None:
            assert os.getpriority(os.PRIO_PROCESS, child) == 19
        else:
            assert os.sched_getscheduler(child) == policy
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_child_whose_parents_death_is_not_told_ends_by_its_limit() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with(os.getppid(), 30.2, "darwin")
            os.write(writing, str(resource.getrlimit(resource.RLIMIT_CPU)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"(32, 32)"
    os.close(reading)


async def _then_kill(running: Any) -> None:
    task = asyncio.create_task(running)
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)
    await task


def test_files_answer_what_was_compiled_before(tmp_path: Path) -> None:
    job = job_of(constraint.choices(["a", "b"]))
    ready = compile_really(job)
    assert isinstance(ready, GrammarReady)
    files = GrammarFiles(tiny(), tmp_path / "new")
    assert files.get(job.key) is None
    files.put(ready)
    assert GrammarFiles(tiny(), tmp_path / "new").get(job.key) == ready
    (written,) = (tmp_path / "new").iterdir()
    written.write_bytes(written.read_bytes()[:-5])
    assert files.get(job.key) is None, "a torn file is as good as none"


def test_files_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    files = GrammarFiles(tiny(), tmp_path, max_bytes=3000)
    jobs = [told(f"fine{i}") for i in range(4)]
    for i, job in enumerate(jobs):
        files.put(GrammarReady(key=job.key, engine="e", payload=bytes(900)))
        for path in tmp_path.iterdir():
            os.utime(path, (path.stat().st_mtime - 10, path.stat().st_mtime - 10))
        if i >= 1:
            assert files.get(jobs[0].key) is not None  # and so it was used last
    assert files.get(jobs[1].key) is None
    assert files.get(jobs[3].key) is not None


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = GrammarFiles(tiny(), tmp_path / "file")
    job = told("fine")
    files.put(GrammarReady(key=job.key, engine="e", payload=b""))
    assert files.get(job.key) is None


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), ZeroDivisionError("oh")], ids=repr)
def test_a_failure_that_nobody_foresaw_is_an_answer(error: Exception) -> None:
    def fail(*_: object) -> Compiled:
        raise error

    outcome = answer(job_of(constraint.regex("a")), tiny(), compile_constraint=fail)
    assert isinstance(outcome, GrammarFailed)
    assert (outcome.error.code, outcome.error.field) == ("invalid_constraint", "regex")


async def _spare() -> tuple[list[Answer], list[bytes]]:
    """A job that finds a warmed process, one at once behind it, and a long one."""
    answers: list[Answer] = []
    reading, writing = os.pipe()
    runner = compile_jobs(behave, answers.append, warm=lambda: os.write(writing, f"{os.getpid()} ".encode()))
    try:
        warmed = os.read(reading, 100).split()
        long = CompileGrammar(key="long", constraint=Constraint(kind="regex", source="a" * 1_000_000))
        for job in (told("fine1"), told("fine2"), long):
            runner.submit(job)
        while len(answers) < 3:
            await asyncio.sleep(0.01)
        return answers, [*warmed, *os.read(reading, 100).split()]
    finally:
        runner.close()
        os.close(reading)
        os.close(writing)


def test_a_process_is_forked_and_warmed_before_its_job_comes() -> None:
    answers, warmed = wait(_spare())
    ready = [outcome for outcome in answers if isinstance(outcome, GrammarReady)]
    assert [outcome.key for outcome in ready] == ["fine1", "fine2", "long"]
    assert ready[0].payload == warmed[0]
    assert len(warmed) == 2, "jobs that wait for their turn start without warming"
    assert warmed[1] not in {outcome.payload for outcome in ready}
    assert ready[2].engine == "a" * 1_000_000


async def _dead_spare() -> list[Answer]:
    answers: list[Answer] = []
    reading, writing = os.pipe()
    runner = compile_jobs(behave, answers.append, warm=lambda: os.write(writing, b"%d" % os.getpid()))
    try:
        pid = int(os.read(reading, 100))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for job in ("fine1", "fine2"):
            runner.submit(told(job))
        while len(answers) < 2:
            await asyncio.sleep(0.01)
        return answers
    finally:
        runner.close()
        os.close(reading)
        os.close(writing)


def test_a_waiting_process_that_was_killed_fails_no_job() -> None:
    assert all(isinstance(outcome, GrammarReady) for outcome in wait(_dead_spare()))
