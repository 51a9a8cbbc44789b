"""Random programs have the same results concurrently as one by one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

import ramify as rm
from tests.lang.backends import Holding
from tests.lang.programs.random_program import Plan, answering
from tests.lang.test_programs import outcome

pytestmark = pytest.mark.slow


@rm.function
def program(s, seed):
    s += f"Program {seed}:"
    return Plan(seed).write(s, "tea")


def test_programs_of_random_shape():
    seeds = list(range(150))
    alone = [outcome(program.run(seed, backend=answering())) for seed in seeds]
    together = program.run_batch([(seed,) for seed in seeds], concurrency=16, backend=answering())
    assert [outcome(state) for state in together] == alone
    assert sum(len(one["calls"]) for one in alone) > 1000


def test_states_shared_by_threads():
    """Threads of the body append to their own branches, and read variables of the others."""

    @rm.function
    def threaded(s):
        s += "Q"
        forks = s.fork(8)

        def work(index):
            for turn in range(20):
                forks[index] += f" {index}.{turn}" + rm.gen(f"x{turn}")
            return forks[(index + 1) % 8].text()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [branch.text() for branch in forks]

    texts = threaded.run(backend=rm.ScriptedBackend(lambda request: "!")).ret_value
    for index, text in enumerate(texts):
        assert text == "Q" + "".join(f" {index}.{turn}!" for turn in range(20))


def test_a_real_ctrl_c_while_a_read_blocks():
    backend = Holding(["long answer"])

    @rm.function
    def waiting(s):
        s += "Q" + rm.gen("x")
        s["x"]

    def interrupt():
        backend.started.block()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.run(backend=backend)
    thread.join()
    assert backend.aborted == 1


def test_two_event_loops_one_after_the_other():
    @rm.function
    async def short(s):
        s += "Q" + rm.gen("x")
        return await s.aget("x")

    backend = rm.ScriptedBackend(lambda request: "a")
    for _ in range(3):
        assert asyncio.run(short.run(backend=backend)).ret_value == "a"


def test_a_script_that_ends_while_a_stream_runs_exits_cleanly():
    code = (
        "import ramify as rm\n"
        "@rm.function\n"
        "def f(s): s += 'Q' + rm.gen('x')\n"
        "state = f.run(backend=rm.ScriptedBackend(lambda r: 'a ' * 5000), stream=True)\n"
        "print(next(state.text_iter('x')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")
