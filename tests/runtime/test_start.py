"""How the processes start: what they import, and what becomes of those that nobody takes."""

from __future__ import annotations

import subprocess
import sys

from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.prestart import ROLES, PrestartedWorkers

SCHEDULER = """
import sys
import ramify.runtime.scheduler.process
late = ("transformers", "llguidance", "fastapi")
grammar = ("engine.load", "compile.policy", "automaton.token_trie")
late += tuple(f"ramify.grammar.{name}" for name in grammar)
assert not [name for name in late if name in sys.modules]
"""


def test_the_scheduler_imports_what_only_constraints_need_later() -> None:
    subprocess.run([sys.executable, "-c", SCHEDULER], check=True)


def test_workers_that_no_ring_has_taken_are_ended() -> None:
    with PrestartedWorkers(EngineConfig()) as workers:
        processes = dict(workers._processes)
    assert processes.keys() == ROLES.keys()
    assert all(process.returncode is not None for process in processes.values())
    assert not workers.take()
