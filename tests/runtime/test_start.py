"""Start of the worker processes: their imports, and the end of workers that no engine takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.engine_messages import Ready
from ramify.errors import EngineError
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.processes.engine_processes import EngineProcesses
from ramify.runtime.processes.prestart import ROLES, PrestartedWorkers

SCHEDULER = """
import sys
import ramify.runtime.scheduler.process
late = ("transformers", "llguidance", "starlette")
grammar = ("engine.load", "compile.policy", "automaton.masks.token_trie")
late += tuple(f"ramify.grammar.{name}" for name in grammar)
assert not [name for name in late if name in sys.modules]
"""


def test_the_scheduler_imports_what_only_constraints_need_later() -> None:
    subprocess.run([sys.executable, "-c", SCHEDULER], check=True)


def test_workers_that_no_engine_has_taken_are_ended() -> None:
    with PrestartedWorkers(EngineConfig()) as workers:
        processes = dict(workers._processes)
    assert processes.keys() == ROLES.keys()
    assert all(process.returncode is not None for process in processes.values())
    assert not workers.take()


class Waiting:
    """Fake workers, which wait until their standard input is closed."""

    def take(self) -> dict[str, Any]:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        return {role: subprocess.Popen(command, stdin=subprocess.PIPE) for role in ("tokenizer", "scheduler")}


def test_a_worker_that_ends_before_the_others_are_ready_ends_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        files = ModelFiles("model", tmp_path, tmp_path)
        workers: Any = Waiting()
        engine = EngineProcesses(
            EngineConfig(), files, workers, receive=lambda message: None, died=lambda role: None
        )
        start = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0)
        engine._handle(Ready(role="tokenizer", pid=engine.pids["tokenizer"]))
        engine._processes["tokenizer"].kill()
        with pytest.raises(EngineError, match="tokenizer process ended"):
            await asyncio.wait_for(start, 10.0)

    asyncio.run(run())
