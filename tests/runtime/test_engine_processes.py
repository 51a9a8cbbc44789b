"""The processes: they start together, answer, survive a death, and never outlive their parent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.constraint import json_schema
from ramify.errors import (
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptTooLong,
    RamifyError,
)
from ramify.loop import wait
from ramify.messages import ChatMessage, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.fleet.local import LocalFleet
from ramify.runtime.fleet.supervisor import EngineSupervisor
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.processes import engine_processes
from ramify.runtime.processes.detokenizer import joined
from ramify.runtime.processes.prestart import ROLES
from ramify.sampling_params import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), dtype="float32", num_pages=256, threads=1) as engine:
        yield engine


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    """Whether all processes end within `within_s`. A pidfd becomes readable when its process ends."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(fd)
            if not ready:
                return False
    return True


def children(pid: int) -> list[int]:
    """Ids of all descendants of the process `pid`."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                below.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        new = below.get(todo.pop(), [])
        found += new
        todo += new
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# --- answers ------------------------------------------------------------------------------------


def test_text_usage_and_ids_agree(engine: Engine) -> None:
    first = engine.complete("hello", max_tokens=8, temperature=0.0, ignore_eos=True)
    again = engine.complete("hello", max_tokens=8, temperature=0.0, ignore_eos=True)
    assert len(first.ids) == 8
    assert (first.text, first.ids) == (again.text, again.ids)
    assert (first.finish.reason, first.usage.completion_tokens) == ("length", 8)
    assert again.usage.cached_tokens == 4


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_who_wants_few_chunks_gets_few(engine: Engine, stop: tuple[str, ...]) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=stop)

    async def ask(every_s: float) -> list[TextChunk]:
        request = Generate(rid=f"e{every_s}{stop}", prompt=("hello",), sampling=sampling, every_s=every_s)
        return [chunk async for chunk in engine.generate(request)]

    each, held = wait(ask(0.0)), wait(ask(1000.0))
    assert len(each) > 1
    assert len(held) == 1
    assert held[0].ids == joined(each).ids
    assert (held[0].text, held[0].finish) == (joined(each).text, each[-1].finish)


def test_chat_and_many_at_once(engine: Engine) -> None:
    chat = engine.complete(chat=[ChatMessage(role="user", content="hi")], max_tokens=3, temperature=0.0)
    assert chat.usage.prompt_tokens == 2 + 3
    prompts = [f"prompt number {i}" for i in range(40)]
    together = engine.complete_many(prompts, max_tokens=6, temperature=0.0, ignore_eos=True)
    alone = [
        engine.complete(prompt, max_tokens=6, temperature=0.0, ignore_eos=True) for prompt in prompts[:5]
    ]
    assert [result.ids for result in together[:5]] == [result.ids for result in alone]


def test_server_info(engine: Engine) -> None:
    info = engine.get_server_info()
    assert info["num_pages"] == info["stats"]["pages_total"] == 256
    assert info["model_info"]["context_length"] == 512
    assert (info["max_running"], info["chunk_tokens"]) == (128, 512)


def test_a_stop_string_ends_the_work(engine: Engine) -> None:
    free = engine.complete("stop here", max_tokens=40, temperature=0.0, ignore_eos=True)
    stop = free.text[10:13]
    stopped = engine.complete("stop here", max_tokens=40, temperature=0.0, ignore_eos=True, stop=(stop,))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish.reason, stopped.finish.matched) == ("stop", stop)
    assert engine.stats().running == 0


def test_what_is_wrong_is_said(engine: Engine) -> None:
    for options, error in (
        ({"prompt": ""}, "empty"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x" * 600}, "600 tokens"),
        ({"prompt": "\ud800"}, r"prompt\[0\] has half of a surrogate pair"),
        ({"prompt": "x", "n": 2}, "n must be 1"),
    ):
        with pytest.raises(InvalidRequest, match=error):
            engine.complete(**options)  # type: ignore[arg-type]


def test_token_ids_are_prompts(engine: Engine) -> None:
    pids = engine.pids
    assert engine.complete([1, 2], max_tokens=3, ignore_eos=True).usage.prompt_tokens == 2
    assert engine.embed([[1, 2], [3]], pooling="last").shape[0] == 2
    for given in ([1, 10**6], [-1]):
        with pytest.raises(InvalidRequest, match="vocabulary"):
            engine.complete(given, max_tokens=3)
    with pytest.raises(InvalidRequest, match="64 bits"):
        engine.complete([10**30], max_tokens=3)
    assert engine.pids == pids


def test_a_request_that_the_tokenizer_cannot_read_fails_alone(engine: Engine) -> None:
    pids = engine.pids
    wrong: Any = ["a"]
    with pytest.raises(InvalidRequest, match="cannot be read"):
        engine.complete("x", max_tokens=3, scope=wrong)
    assert engine.complete("x", max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
    assert engine.pids == pids


def test_the_room_for_kv_is_told_and_so_is_how_a_longer_prompt_fits(engine: Engine) -> None:
    info = engine.get_server_info()["model_info"]
    room = info["kv_room"]
    assert (room["tokens"], room["bound"]) == (254 * 16, "option")
    assert room["text"].startswith("KV memory for 4,064 tokens, ")
    assert ", as num_pages 256 says: " in room["text"]
    assert f"KV of {room['tokens']:,} tokens" in repr(engine)
    for count in (room["tokens"], room["tokens"] + 1, 100_000):
        with pytest.raises(PromptTooLong) as refused:
            engine.complete([5] * count, max_tokens=1)
        assert refused.value.remedy == f"Send less text, or {room['remedy']}."


def test_leaving_a_stream_ends_its_work(engine: Engine) -> None:
    async def leave() -> list[TextChunk]:
        request = Generate(
            rid="leaving", prompt=("abc",), sampling=SamplingParams(max_tokens=400, ignore_eos=True)
        )
        async with contextlib.aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
            return [await anext(chunks) for _ in range(3)]

    assert len(wait(leave())) == 3
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.pages_in_use == 0


def test_an_abort_says_so(engine: Engine) -> None:
    async def abort() -> TextChunk:
        request = Generate(
            rid="doomed", prompt=("abc",), sampling=SamplingParams(max_tokens=400, ignore_eos=True)
        )
        last = None
        async for chunk in engine.generate(request):
            if last is None:
                assert await engine.abort("doomed")
            last = chunk
        assert last is not None
        return last

    finish = wait(abort()).finish
    assert finish is not None
    assert finish.reason == "abort"


def test_overload_is_refused_and_harms_nobody(tiny_folder: Path) -> None:
    with Engine(
        str(tiny_folder), dtype="float32", num_pages=64, threads=1, max_running=2, max_waiting=2
    ) as engine:

        async def crowd() -> list[Any]:
            return await asyncio.gather(
                *(engine.acomplete("abc", max_tokens=30, ignore_eos=True) for _ in range(10)),
                return_exceptions=True,
            )

        results = wait(crowd())
        refused = [result for result in results if isinstance(result, Overloaded)]
        assert len(refused) == 6
        assert all(refusal.retry_after for refusal in refused)
        assert all(len(result.ids) == 30 for result in results if not isinstance(result, BaseException))


# --- deaths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "detokenizer"])
def test_a_killed_worker_comes_back(tiny_folder: Path, role: str) -> None:
    with Engine(str(tiny_folder), dtype="float32", num_pages=256, threads=1) as engine:
        before = engine.pids

        options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
        number = json_schema({"type": "integer", "minimum": 10**60})
        requests = {
            "greedy": {"temperature": 0.0},
            "seeded": {"temperature": 1.0, "seed": 5, "logprobs": 1},
            "drawn": {"temperature": 1.0},
            "stop": {"temperature": 1.0, "seed": 2, "stop": ("never", "e")},
            "integer": {"temperature": 1.0, "seed": 4, "max_tokens": 150, "ignore_eos": False},
        }

        async def said(name: str, killing: bool) -> list[TextChunk]:
            request = Generate(
                rid=f"{name}{killing}",
                prompt=(f"abc {name}",),
                sampling=SamplingParams(**(options | requests[name])),
                constraint=number if name == "integer" else None,
            )
            chunks = []
            async for chunk in engine.generate(request):
                chunks.append(chunk)
                if killing and len(chunks) == 4:
                    # By now another request may have killed it.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(before[role], signal.SIGKILL)
            return chunks

        async def all_said(killing: bool) -> list[list[TextChunk]]:
            return await asyncio.gather(*[said(name, killing) for name in requests])

        broken = wait(asyncio.wait_for(all_said(True), 60))
        assert not set(before.values()) & set(engine.pids.values())
        assert gone(list(before.values()))
        unbroken = wait(all_said(False))
        for name, chunks, whole in zip(requests, map(joined, broken), map(joined, unbroken), strict=True):
            if name == "drawn":
                assert len(chunks.ids) == 120
                continue
            assert (chunks.text, chunks.ids, chunks.finish) == (whole.text, whole.ids, whole.finish), name
            assert (chunks.kept_ids, chunks.tail) == (whole.kept_ids, whole.tail), name
            if name == "seeded":
                assert chunks.logprobs.ids == whole.logprobs.ids == whole.ids
                # Batches of other sizes round differently.
                assert chunks.logprobs.logprobs == pytest.approx(whole.logprobs.logprobs, abs=1e-3)
            assert chunks.usage.completion_tokens == whole.usage.completion_tokens, name
            assert chunks.forced == whole.forced, name


@pytest.mark.long
def test_a_worker_that_hangs_is_replaced(tiny_folder: Path) -> None:
    config = EngineConfig(model=str(tiny_folder), dtype="float32", num_pages=256, threads=1)
    make_engine = functools.partial(EngineSupervisor, heartbeat_s=0.2, silent_s=4.0)
    engine = Frontend(
        config, make_fleet=lambda events: LocalFleet(config, None, events, make_engine=make_engine)
    )
    wait(engine.start())
    try:
        before = engine.pids
        request = Generate(
            rid="r",
            prompt=("abc",),
            sampling=SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        )

        async def said() -> list[TextChunk]:
            chunks = []
            async for chunk in engine.generate(request):
                chunks.append(chunk)
                if len(chunks) == 4 and engine.pids == before:
                    os.kill(before["scheduler"], signal.SIGSTOP)
            return chunks

        assert len(joined(wait(asyncio.wait_for(said(), 60))).ids) == 60
        assert not set(before.values()) & set(engine.pids.values())
        assert gone(list(before.values()))
    finally:
        wait(engine.aclose())


def test_a_model_that_cannot_be_loaded_is_one_clear_error(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, on_loop = engine_processes.stop, []

    def watched(process: subprocess.Popen[bytes]) -> None:
        on_loop.append(asyncio._get_running_loop() is not None)
        stop(process)

    monkeypatch.setattr(engine_processes, "stop", watched)
    with pytest.raises(NotFound):
        Engine(str(tmp_path / "nothing")).start()
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(RamifyError, match=r"safetensors|scheduler|header"):
        Engine(str(tmp_path), threads=1).start()
    assert on_loop
    assert not any(on_loop), "other models' requests would wait for the workers' ends"


SCRIPT = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from ramify.runtime.processes.detokenizer import joined
from ramify.runtime.engine.engine import Engine
engine = Engine({model!r}, dtype="float32", num_pages=64, threads=1).start()
engine.complete("x", max_tokens=2)
print("ready", flush=True)
sys.stdin.readline()
{then}
"""


@contextlib.contextmanager
def script(model: Path, then: str) -> Iterator[tuple[subprocess.Popen[str], Path, list[int]]]:
    """Run a user's script; yields (process, socket directory, worker pids) when it has printed "ready"."""
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short enough for sockets
    code = textwrap.dedent(SCRIPT).format(model=str(model), then=textwrap.dedent(then))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        process_group=0,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (directory,) = temporary.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        yield (
            process,
            directory,
            [pid for pid in children(process.pid) if "-m\0ramify.runtime" in _command(pid)],
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the script forked is in its group; workers are not
        process.communicate()
        shutil.rmtree(temporary)


@pytest.mark.parametrize(
    ("then", "signals", "code"),
    [
        ("", [], 0),
        pytest.param("engine.close(); sys.stdin.readline()", [], 0, marks=pytest.mark.long),
        ("raise ValueError('mine')", [], 1),
        pytest.param("sys.exit(7)", [], 7, marks=pytest.mark.long),
        pytest.param("sys.stdin.readline()", [signal.SIGINT], None, marks=pytest.mark.long),
        (
            "engine.complete('x', max_tokens=400, ignore_eos=True); sys.stdin.readline()",
            [signal.SIGINT],
            None,
        ),
        ("sys.stdin.readline()", [signal.SIGKILL], -signal.SIGKILL),
        pytest.param(
            "os.fork() or sys.stdin.readline(); sys.stdin.readline()",
            [signal.SIGKILL],
            -signal.SIGKILL,
            marks=pytest.mark.long,
        ),
    ],
    ids=["end", "close", "exception", "exit", "ctrl-c", "ctrl-c-busy", "kill", "kill-with-a-fork"],
)
def test_no_orphan_and_no_stale_socket(
    tiny_folder: Path, then: str, signals: list[signal.Signals], code: int | None
) -> None:
    with script(tiny_folder, then) as (process, directory, workers):
        assert len(workers) >= len(ROLES)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        for number in signals:
            process.send_signal(number)
        if not signals:
            process.communicate("\n", timeout=60)
        else:
            process.wait(60)
        if code is not None:
            assert process.returncode == code
        else:
            assert process.returncode != 0
        assert gone(workers)
        assert not directory.exists()


def test_sockets_fit_where_temporary_files_lie_deep(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Engine(str(tiny_folder), dtype="float32", num_pages=64, threads=1) as engine:
        assert len(engine.complete("x", max_tokens=1, ignore_eos=True).ids) == 1


FORKING = """
if os.fork() == 0:
    try:
        engine.complete("x", max_tokens=1)
    except Exception as error:
        print(error, flush=True)
    engine.close()
    sys.exit(0)
os.wait()
print(len(engine.complete("x", max_tokens=2, ignore_eos=True).ids), flush=True)
"""


def test_a_forked_child_leaves_the_engine_to_its_parent(tiny_folder: Path) -> None:
    with script(tiny_folder, FORKING) as (process, _, workers):
        printed, _ = process.communicate("go\n", timeout=60)
        refused, count = printed.splitlines()
        assert f"belongs to process {process.pid}" in refused
        assert "Make an Engine in each process" in refused
        assert count == "2"
        assert gone(workers)


def test_a_closed_engine_refuses(tiny_folder: Path) -> None:
    engine = Engine(str(tiny_folder), dtype="float32", num_pages=64, threads=1).start()
    workers = list(engine.pids.values())
    engine.close()
    engine.close()
    assert gone(workers)
    with pytest.raises(EngineClosed):
        engine.complete("x", max_tokens=1)
