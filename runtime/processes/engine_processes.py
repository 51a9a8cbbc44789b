"""The processes of an engine core: they start, talk to the frontend, and stop together."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from ramify.engine_messages import Ready, ToFrontend, ToTokenizer
from ramify.errors import EngineError, WorkerDied, from_info
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets, socket_folder
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.runtime.processes.shares import Share
from ramify.runtime.processes.worker_process import Orders, close, give_orders, stop


class EngineProcesses:
    """Tokenizer, scheduler and detokenizer, which talk to this process through a private directory.

    `receive` and `died` are called on the event loop that `start` ran on.

    workers : prestarted processes that `start` gives their orders; None: `start` starts new ones
    share : cores and GPUs of the processes that `start` starts; None for the whole machine
    receive : called with every message that arrives, except `Ready`
    died : called with the role of a worker that has ended without being stopped
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        workers: PrestartedWorkers | None,
        *,
        share: Share | None = None,
        draft_files: ModelFiles | None = None,
        receive: Callable[[ToFrontend], None],
        died: Callable[[str], None],
    ) -> None:
        self._config = config
        self._files = files
        self._draft_files = draft_files
        self._workers = workers
        self._share = share
        self._receive = receive
        self._died = died
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready: dict[str, asyncio.Future[Ready]] = {}
        self._inbox: Inbox[ToFrontend] | None = None
        self._tokenizer: Outbox | None = None
        self._directory: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> dict[str, Ready]:
        """Give the workers their orders and wait until all are ready. Returns the `Ready` message of each
        role. If a worker cannot start, stops all and raises the error."""
        self._loop = loop = asyncio.get_running_loop()
        self._directory = socket_folder()
        sockets = Sockets(self._directory)
        self._inbox = Inbox(sockets.frontend, ToFrontend)
        self._inbox.attach(loop, self._handle)
        self._tokenizer = Outbox(sockets.tokenizer)
        draft = self._draft_files
        orders = Orders(
            sockets=str(self._directory),
            config=self._config,
            tokenizer=str(self._files.tokenizer),
            weights=str(self._files.weights),
            model_name=self._files.name,
            draft_weights=None if draft is None else str(draft.weights),
            draft_tokenizer=None if draft is None else str(draft.tokenizer),
        )
        self._processes = (self._workers or PrestartedWorkers(self._config, self._share)).take()
        self._ready = {role: loop.create_future() for role in self._processes}
        for role, process in self._processes.items():
            give_orders(process, orders)
            threading.Thread(target=self._watch, args=(role, process), daemon=True).start()
        try:
            await asyncio.gather(*self._ready.values())
        except BaseException:
            self.disconnect()
            await asyncio.to_thread(self.stop)  # waits for the workers
            raise
        return {role: ready.result() for role, ready in self._ready.items()}

    def send(self, message: ToTokenizer) -> None:
        if self._tokenizer is None:
            raise EngineError("The engine core is not running.")
        self._tokenizer.send(message)

    def disconnect(self) -> None:
        """Close both sockets. Must be called on the event loop."""
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        if self._tokenizer is not None:
            self._tokenizer.close()
            self._tokenizer = None

    def stop(self) -> None:
        """End all workers, wait for them, and remove the sockets. May be called twice.

        Before `disconnect`, only the event loop's thread may call this method; afterwards any thread may.
        """
        self.disconnect()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            close(process)  # closes all before waiting, so that they end at the same time
        for process in processes.values():
            stop(process)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        for ready in self._ready.values():
            if ready.done() and not ready.cancelled():
                ready.exception()  # asyncio would log an exception that nobody has retrieved

    @property
    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self._processes.items()}

    def _handle(self, message: ToFrontend) -> None:
        if not isinstance(message, Ready):
            self._receive(message)
            return
        ready = self._ready[message.role]
        if ready.done():
            return
        if message.error is not None:
            ready.set_exception(from_info(message.error))
        else:
            ready.set_result(message)

    def _watch(self, role: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended, role, process, code)

    def _ended(self, role: str, process: subprocess.Popen[bytes], code: int) -> None:
        if self._processes.get(role) is not process:
            return  # stopped by us
        if all(ready.done() for ready in self._ready.values()):
            self._died(role)
        else:
            # The message that explains the failure may still be in the socket.
            assert self._loop is not None
            self._loop.call_later(1.0, self._give_up, role, code)

    def _give_up(self, role: str, code: int) -> None:
        """Fail the start, since the worker `role` has ended before all workers were ready. If all have become
        ready meanwhile, report a death instead."""
        starting = [ready for ready in self._ready.values() if not ready.done()]
        for ready in starting:
            ready.set_exception(WorkerDied(f"The {role} process ended with code {code} while starting."))
        if not starting:
            self._died(role)
