"""Keeps a grammar compiler process: starts it, talks to it, tells the scheduler when it dies."""

from __future__ import annotations

import os
import subprocess
import threading

from ramify.grammar.vocabulary import Vocabulary
from ramify.ring_messages import CompileGrammar, CompilerDied
from ramify.runtime.processes.ipc import Outbox, Sockets
from ramify.runtime.processes.worker_process import Orders, spawn


class CompilerHost:
    """One compiler process at a time; `generation` tells a dead one's last words from its successor's."""

    def __init__(self, orders: Orders, sockets: Sockets, vocabulary: Vocabulary) -> None:
        self._orders = orders
        self._sockets = sockets
        self._vocabulary = [str(vocabulary.size), ",".join(map(str, vocabulary.stop_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self.generation = 0

    def start(self) -> None:
        self.generation += 1
        # A socket of its own for every process: what a dead one had not read is not for the next.
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

    def send(self, message: CompileGrammar) -> None:
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
        # ZeroMQ sockets belong to one thread: this one has its own.
        outbox = Outbox(self._sockets.scheduler)
        outbox.send(CompilerDied(generation=generation))
        outbox.close(linger_s=1.0)
