"""How the processes start: what they import, and what becomes of those that nobody takes."""

from __future__ import annotations

import subprocess
import sys

from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.workers import ROLES, Workers

TORCH = """
import sys
from ramify.runtime.processes.torch_import import PUT_OFF, import_torch
import_torch()
import torch
assert PUT_OFF not in sys.modules and "torch._refs" not in sys.modules
assert not hasattr(torch, "_meta_registrations")
assert (torch.ones(2, 3) @ torch.ones(3, 2)).tolist() == [[3, 3], [3, 3]]
import torch._meta_registrations
assert hasattr(torch._meta_registrations, "register_meta")
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.ones(1)).tolist() == [2]
"""

SCHEDULER = """
import sys
from ramify.runtime.processes.torch_import import import_torch
import_torch()
import ramify.runtime.scheduler.process
late = ("torch._refs", "transformers", "llguidance", "fastapi")
grammar = ("engine.load", "compile.policy", "automaton.token_trie")
late += tuple(f"ramify.grammar.{name}" for name in grammar)
assert not [name for name in late if name in sys.modules]
"""


def test_torch_without_what_only_its_compiler_needs() -> None:
    subprocess.run([sys.executable, "-c", TORCH], check=True)


def test_the_scheduler_imports_what_only_constraints_need_later() -> None:
    subprocess.run([sys.executable, "-c", SCHEDULER], check=True)


def test_workers_that_no_ring_has_taken_are_ended() -> None:
    with Workers(EngineConfig()) as workers:
        processes = dict(workers._processes)
    assert processes.keys() == ROLES.keys()
    assert all(process.returncode is not None for process in processes.values())
    assert not workers.take()
