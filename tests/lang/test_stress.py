"""Random programs have the same results concurrently as one by one."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading

import pytest

import ramify as rm
from tests.lang.backends import Holding

pytestmark = pytest.mark.slow


def answer(request):
    """An answer that depends on the whole prompt, so that any mix-up shows."""
    return f" r{sum(map(ord, str(request.prompt[0]))) % 997} {len(request.prompt)}"


def shape(seed: int, depth: int = 3) -> list:
    """A random program: text, gens, reads, forks and joins, as nested lists."""
    rng = random.Random(seed)
    steps = []
    for index in range(rng.randint(1, 5)):
        kind = rng.choice(["text", "gen", "read", "fork", "select"] if depth else ["text", "gen", "read"])
        if kind == "fork":
            branches = [shape(rng.randint(0, 1 << 30), depth - 1) for _ in range(rng.randint(1, 3))]
            steps.append((kind, rng.choice(["gather_variable", "concate_and_append"]), branches))
        else:
            steps.append((kind, f"v{index}", f" t{rng.randint(0, 99)}"))
    return steps


def play(s, steps, expected: list[str]) -> None:
    for kind, name, detail in steps:
        if kind == "text":
            s += detail
        elif kind == "gen":
            s += detail + rm.gen(name)
        elif kind == "select":
            s += " pick:" + rm.select(f"pick {name}", [" a", detail])
        elif kind == "read":
            expected.append(s.text())
        else:
            forks = s.fork(len(detail))
            for branch, inner in zip(forks, detail, strict=True):
                play(branch, inner, expected)
            forks.join(name)


@rm.function
def program(s, seed):
    s += f"Program {seed}:"
    reads: list[str] = []
    play(s, shape(seed), reads)
    return reads


def outcome(state):
    reads = state.ret_value
    calls = [(call.kind, call.name, call.text, call.usage.prompt_tokens) for call in state.trace.walk()]
    return reads, state.text(), calls


def test_programs_of_random_shape():
    seeds = list(range(150))

    def backend():
        return rm.ScriptedBackend({**{f"pick v{index}": " a" for index in range(5)}, "Program": answer})

    alone = [outcome(program.run(seed, backend=backend())) for seed in seeds]
    together = program.run_batch([(seed,) for seed in seeds], concurrency=16, backend=backend())
    assert [outcome(state) for state in together] == alone
    assert sum(len(calls) for _, _, calls in alone) > 1000


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
    # A shell starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            waiting.run(backend=backend)
    finally:
        signal.signal(signal.SIGINT, before)
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
