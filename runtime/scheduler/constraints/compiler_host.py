"""Owns the grammar compiler's process: starts it, sends it jobs, tells the scheduler when it dies."""

from __future__ import annotations

import os
import subprocess
import threading

from ramify.engine_messages import CompileGrammar, CompilerDied, DropGrammar
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.processes.ipc import Outbox, Sockets
from ramify.runtime.processes.worker_process import Orders, spawn


class CompilerHost:
    """One compiler process at a time. `generation` counts them, so that `CompilerDied` names the one that
    died."""

    def __init__(self, orders: Orders, sockets: Sockets, vocabulary: Vocabulary) -> None:
        self._orders = orders
        self._sockets = sockets
        self._vocabulary = [str(vocabulary.size), ",".join(map(str, vocabulary.stop_ids))]
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self.generation = 0

    def start(self) -> None:
        self.generation += 1
        # Each process has a socket of its own, so that a new one does not read the messages to a dead one.
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

    def send(self, message: CompileGrammar | DropGrammar) -> None:
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
        # A ZeroMQ socket belongs to one thread, so this thread opens its own.
        outbox = Outbox(self._sockets.scheduler)
        outbox.send(CompilerDied(generation=generation))
        outbox.close(linger_s=1.0)
