"""Supervisor of an engine core: starts it, asks it for heartbeats, and restarts it when a worker dies."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from ramify.decisions.calibration import check_calibration, read_calibration
from ramify.decisions.layouts import LAYOUTS
from ramify.engine_messages import GetStats, ToFrontend, ToTokenizer
from ramify.errors import EngineClosed, EngineError, InvalidRequest, RamifyError, WorkerDied
from ramify.model_info import ModelInfo
from ramify.questions import Calibration
from ramify.runtime.config import EngineConfig
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.replica import HEARTBEAT, HEARTBEAT_S, SILENT_S, EngineEvents
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles, digest, fingerprint, is_eagle3
from ramify.runtime.processes.engine_processes import EngineProcesses
from ramify.runtime.processes.prestart import PrestartedWorkers
from ramify.runtime.processes.shares import Share

log = logging.getLogger("ramify")

RESTART_LIMIT = 3
"""Maximum number of deaths within RESTART_WINDOW_S, those of starting workers included. After one more death
the supervisor gives up."""
RESTART_WINDOW_S = 60.0


class EngineSupervisor:
    """An `EngineCore` on this machine, which is restarted when it dies.

    All callbacks run on the event loop that `start` ran on.

    Parameters
    ----------
    workers
        Processes for the first engine core, if they were started early.
    share
        Cores and GPUs of the processes; None for the whole machine.
    name
        Name of the replica in the log; "" if there is only one.
    events
        Callbacks. A death does not count for `RESTART_LIMIT` if `died` returns True: a request is its cause.
    busy
        Returns whether anything waits for an answer of the engine core. If so, silence of `SILENT_S` counts
        as a death.
    launch
        Makes the processes; called with the arguments of `EngineProcesses`.
    heartbeat_s, silent_s
        Seconds between two heartbeats, and seconds of silence after which an engine core counts as hung.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: PrestartedWorkers | None,
        *,
        share: Share | None = None,
        name: str = "",
        events: EngineEvents,
        busy: Callable[[], bool] = lambda: False,
        launch: Callable[..., EngineProcesses] = EngineProcesses,
        heartbeat_s: float = HEARTBEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._config = config
        self._workers = workers
        self._share = share
        self._of = f"replica {name}: " if name else ""
        self._events = events
        self._busy = busy
        self._launch = launch
        self._heartbeat_s = heartbeat_s
        self._silent_s = silent_s
        self._unheard = 0
        """Number of heartbeats since the last message. Unlike a clock, the count does not include time in
        which this process itself stood still."""
        self._engine: EngineProcesses | None = None
        self._last_message = 0.0
        self._heartbeat: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._restart_times: collections.deque[float] = collections.deque()
        self._running = False
        """Whether an engine core was started. False after `close_now`, `aclose` or a failed restart."""
        self._files: ModelFiles | None = None
        self._draft_files: ModelFiles | None = None
        self._calibration: Calibration | None = None
        """The content of the calibration's file at the start. A restart does not read the file again."""
        self.info: ModelInfo | None = None
        self.max_prompt_tokens = 0
        self.page_bytes = 0

    async def start(self) -> None:
        """Find the model's files and start the engine core. Raises when either fails, and for a wrong
        calibration."""
        if self._config.calibration is not None:
            self._calibration = read_calibration(self._config.calibration)
        weights = self._config.load_format != "dummy"
        self._files = await asyncio.to_thread(resolve, self._config.model, weights=weights)
        if is_eagle3(self._files.weights):
            raise InvalidRequest(
                f"{self._config.model} is an EAGLE-3 draft head, and no model.",
                field="model",
                remedy=f"Name its model, and the head with --draft-model {self._config.model}.",
            )
        if self._config.draft_model is not None:
            self._draft_files = await asyncio.to_thread(resolve, self._config.draft_model, weights=weights)
        await self._start_engine()
        self._heartbeat = asyncio.create_task(self._beat())

    async def aclose(self) -> None:
        self._running = False
        # Cancelled first: a restart that ended later would leave an engine core that nobody stops.
        tasks = [task for task in (self._heartbeat, self._restart) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._heartbeat = self._restart = None
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.disconnect()
            await _stop_processes(engine)

    def close_now(self) -> None:
        """Do the part of `aclose` that needs no running event loop."""
        self._running = False
        # Unset first: at the interpreter's exit the heartbeat may run at the same time, in the loop's thread.
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()

    def send(self, message: ToTokenizer) -> None:
        """Send a message, or drop it if there is no engine core. Raises the error if encoding it fails."""
        if self._engine is not None:
            self._engine.send(message)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role."""
        return {} if self._engine is None else self._engine.pids

    @property
    def restarting(self) -> bool:
        return self._restart is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last message from the engine core."""
        return time.monotonic() - self._last_message

    def _handle(self, message: ToFrontend) -> None:
        self._last_message = time.monotonic()
        self._unheard = 0
        self._events.receive(message)

    async def _start_engine(self) -> None:
        assert self._files is not None, "`start` has found them"
        workers, self._workers = self._workers, None
        engine = self._launch(
            self._config,
            self._files,
            workers,
            share=self._share,
            draft_files=self._draft_files,
            receive=self._handle,
            died=self._worker_died,
        )
        ready = await engine.start()
        self._engine = engine
        info = ready["scheduler"].model_info
        assert info is not None
        model = await asyncio.to_thread(digest, self._files, self._config)
        if self._calibration is not None and self._config.calibration is not None:
            layouts = {one.name for one in LAYOUTS.values()} | {info.trained_layout} - {""}
            check_calibration(self._calibration, self._config.calibration, model, layouts)
        self.info = msgspec.structs.replace(
            info,
            chat_format=ready["tokenizer"].chat_format,
            special_tokens=ready["tokenizer"].special_tokens,
            fingerprint=fingerprint(self._files, self._config, info),
            digest=model,
            calibration=self._calibration or info.calibration,
        )
        self.max_prompt_tokens = ready["scheduler"].max_prompt_tokens
        self.page_bytes = ready["scheduler"].page_bytes
        self._unheard = 0
        self._running = True
        self._last_message = time.monotonic()

    def _worker_died(self, role: str) -> None:
        """Restart all workers, since the others are useless without the state of the one that died."""
        if not self._running or self._restart is not None:
            return
        self._begin_restart(f"The {role} process died")

    def _begin_restart(self, reason: str) -> None:
        log.error("%s%s; restarting the engine core", self._of, reason)
        self._restart = asyncio.create_task(self._replace_engine(reason))

    async def _replace_engine(self, reason: str) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            # A late chunk of a request that is about to be sent again would repeat its text.
            engine.disconnect()
        error = WorkerDied(f"{reason} while this request was running.", remedy="Send it again.")
        explained = False
        with errors_logged("telling of a death"):
            explained = self._events.died(error)
        began = time.monotonic()
        try:
            if engine is not None:
                await _stop_processes(engine)
            if not explained:
                self._count_death()
            await self._start_in_tries()
        except Exception as failure:
            if isinstance(failure, RamifyError):
                log.error("%sthe engine core could not be restarted: %s", self._of, failure)
            else:
                log.exception("%sthe engine core could not be restarted", self._of)
            self._running = False
            if not isinstance(failure, WorkerDied) or failure.transient:
                failure = EngineClosed(
                    f"The engine has closed: {failure}",
                    remedy="Restart the engine or server; its log says why.",
                )
            self._events.gave_up(failure)
        else:
            log.warning("%sthe engine core is ready again after %.1f s", self._of, time.monotonic() - began)
            with errors_logged("telling of a new engine core"):
                self._events.restarted()
        finally:
            self._restart = None

    async def _start_in_tries(self) -> None:
        for _ in range(RESTART_LIMIT - 1):
            try:
                await self._start_engine()
                return
            except WorkerDied as failure:
                log.error("%s%s Starting the engine core once more", self._of, failure)
                self._count_death()
        await self._start_engine()

    def _count_death(self) -> None:
        """Raise `WorkerDied` after more than `RESTART_LIMIT` deaths within `RESTART_WINDOW_S`."""
        now = time.monotonic()
        self._restart_times.append(now)
        while now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) > RESTART_LIMIT:
            raise WorkerDied(
                f"Workers died {len(self._restart_times)} times within {RESTART_WINDOW_S:g} s.",
                remedy="Restart the engine or server; its log says why they died.",
                transient=False,
            )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._unheard += 1
            silent = self._unheard > self._silent_s / self._heartbeat_s
            if silent and self._running and self._restart is None and self._busy():
                self._begin_restart(f"The engine core said nothing for {self._silent_s:g} s")
                continue
            with contextlib.suppress(EngineError):  # the engine core was stopped just now
                self.send(GetStats(rid=HEARTBEAT))


async def _stop_processes(engine: EngineProcesses) -> None:
    """Stop an engine core in a thread, since its processes may take seconds to end.

    If the caller is cancelled meanwhile, it still waits until the processes have ended.
    """
    stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
    try:
        await asyncio.shield(stopping)
    except asyncio.CancelledError:
        await stopping
        raise
