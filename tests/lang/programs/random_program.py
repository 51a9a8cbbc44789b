"""Random programs, and a backend whose answers depend on the whole prompt, so that any mix-up shows."""

from __future__ import annotations

import random
from typing import Any

import ramify as rm
from ramify.messages import Generate


def answering() -> rm.ScriptedBackend:
    def answer(request: Generate) -> str:
        if request.sampling.max_tokens == 0:
            return "two"
        drawn = random.Random(f"{backend.prompt_text(request)} {request.sampling.seed}")
        return " ".join(drawn.choice(["red", "green", "box", "sky "]) for _ in range(4))

    backend = rm.ScriptedBackend(answer)
    return backend


class Plan:
    """A random program: texts, calls, reads of earlier results, scopes, forks and joins."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)
        self.names = 0

    def write(self, s: rm.ProgramState, topic: str, depth: int = 0) -> list[Any]:
        """Append some steps; returns the results read."""
        read: list[Any] = [topic]
        open_branches: list[rm.ProgramState] = []
        for _ in range(self.lot.randint(1, 6)):
            self.names += 1
            name, pick = f"v{self.names}", self.lot.choice(read)
            kind = self.lot.choice(["text", "gen", "select", "samples", "scope", "fork", "copy"])
            if kind == "text":
                s += "<" + pick.strip() + "|" + pick + ">"
            elif kind == "gen":
                s += "ask " + pick + rm.gen(name, max_tokens=self.lot.randint(1, 9), stop="x")
                read.append(s[name])
            elif kind == "select":
                s += "which " + rm.select(name, ["one", "two", "three"])
                read.append(s[name].upper())
            elif kind == "samples":
                s += rm.gen(name, n=2, seed=self.names, max_tokens=3)
                read += s[name]
            elif kind == "scope":
                with s.var_scope(name):
                    s += "in " + pick + rm.gen(None, max_tokens=2)
                read.append(s[name])
            elif kind == "copy":
                with s.copy() as aside:
                    aside += "aside " + rm.gen(name)
                read += s[name]
            elif depth < 2:
                forks = s.fork(self.lot.randint(1, 3))
                for fork in forks:
                    read.append(self.write(fork, pick, depth + 1)[-1])
                end = self.lot.choice(["gather_variable", "concate_and_append", None])
                if end is not None:
                    forks.join(end)
                else:
                    open_branches += forks
        for branch in open_branches:
            branch += "late " + self.lot.choice(read)
        return read
