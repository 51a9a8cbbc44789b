"""One run of a program: its backend, options and branches, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from ramify.errors import Cancelled, InvalidRequest, ProgramError, UnsupportedField
from ramify.lang.backends.base import Backend
from ramify.lang.backends.model_info import model_info
from ramify.lang.backends.router import Router, default_of
from ramify.lang.calls.limits import Limits
from ramify.lang.calls.session import Session
from ramify.lang.calls.target import Target
from ramify.lang.common.caller import raised_line
from ramify.lang.common.event import Event
from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import Guarded, ModelStep, Step
from ramify.lang.program.place import PLACE, Place
from ramify.lang.program.variables import Variable
from ramify.lang.trace.calls import Call
from ramify.loop import SIGNAL_CHECK_S, background_loop, submit
from ramify.messages import ModelInfo
from ramify.priority import BATCH

logger = logging.getLogger(__name__)

_default_backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """Set the backend of every run that is given none."""
    global _default_backend
    _default_backend = None if backend is None else _checked(backend)


def find_backend(backend: Backend | str | None, router: Router | None = None) -> Backend:
    """`backend`, or the default one. A name is looked up in `router`, else in the router of the surrounding
    program, else in the default backend: the result is that router with the name as its default.

    Raises `InvalidRequest` where there is none.
    """
    if isinstance(backend, str):
        place = PLACE.get()
        around = None if place is None else place.run()
        names = router or (around and around.router) or _default_backend
        if not isinstance(names, Router):
            raise InvalidRequest(
                f"backend is {backend!r}, and there is no Router that gives names to backends.",
                field="backend",
                remedy="Run the program on rm.Router({...}), or pass the backend itself.",
            )
        return names.on(backend)
    found = _default_backend if backend is None else _checked(backend)
    if found is None:
        raise InvalidRequest(
            "No backend to run on.",
            field="backend",
            remedy="Pass backend=..., or call set_default_backend once.",
        )
    return found


def _checked(backend: Backend) -> Backend:
    if isinstance(backend, type):
        raise InvalidRequest(
            f"{backend.__name__} is a class, not a backend.", field="backend", remedy="Make an instance."
        )
    if not isinstance(backend, Backend):
        raise InvalidRequest(
            f"{backend!r} is not a backend: it lacks info, generate, end_program or aclose.", field="backend"
        )
    return backend


def call_backend(backend: Backend | None, method: str) -> Any:
    """Call a method that only some backends have, and wait for its result; raises `UnsupportedField`."""
    found = find_backend(backend)
    function = getattr(found, method, None)
    if function is None:
        raise UnsupportedField(f"{type(found).__name__} has no {method}.", field=method)
    result = function()
    if asyncio.iscoroutine(result):
        return submit(result).result()
    return result


class Run(Session):
    """The state that all branches of one run share."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        info: ModelInfo,
        options: Mapping[str, Any],
        *,
        scope: str = "",
        stream: bool = False,
        asynchronous: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        place: Place | None = None,
        in_batch: bool = False,
        limits: Limits = (),
    ) -> None:
        parent, around = (None, None) if place is None else (place.call(), place.run())
        super().__init__(
            scope=scope,
            stream=stream,
            in_batch=in_batch or (around is not None and around.in_batch),
            started=None if around is None else around.started,
        )
        self.router = backend if isinstance(backend, Router) else None
        """The backends that steps may choose by name."""
        own = default_of(backend)
        self.home = self._target(own, info)
        """The model of all steps that name no other. Branches keep their content as this model reads it."""
        self._own = own
        self._targets = {own: self.home}
        self.options = options
        self.limits = limits
        """The limits of all steps."""
        self.asynchronous = asynchronous
        """Whether the body is a coroutine, in which no read may block."""
        self.caller_loop = asyncio.get_running_loop() if asynchronous else None
        """The event loop of the body and of its async tools."""
        self.loop = loop or background_loop()
        """The event loop of the steps and of the backend."""
        self.tasks: set[asyncio.Task[None]] = set()
        """A task for each branch that has steps to run; used on `loop` only."""
        self.error: ProgramError | None = None
        """A `ProgramError` with the exception of the body as its cause."""
        self.body_done = Event()
        """Set when the body has ended: no further step is appended."""
        self.finished = Event()
        """Set when all steps are done."""
        self._end_sent = False
        self._open_forks: dict[str, int] = {}
        """Fork key → number of its branches that may still be extended."""
        self._queued_calls: Counter[Target | Backend | str | None] = Counter()
        """Steps in the queues of all branches that will call a model, by `backend` of the step."""
        self._keys = itertools.count()
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.watch: Callable[[Branch, Step, Variable | None], None] | None = None
        """Called with each step when it is appended."""
        call = Call(kind="program", name=name, start_s=self.clock(), parent=parent)
        if parent is not None:
            parent.children.append(call)
        self.root = self.branch(call)

    @property
    def backend(self) -> Backend:
        """The backend of all steps that name no other."""
        return self.home.backend

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self.home.backend = backend

    @property
    def info(self) -> ModelInfo:
        return self.home.info

    # --- the models of its steps ---

    def resolved(self, step: Step, backend: Backend | str | None = None) -> Step:
        """`step` with the backend that it names, else `backend`; None stands for the run's own.

        Raises `InvalidRequest` for an unknown name.
        """
        if isinstance(step, Guarded):
            return replace(step, step=self.resolved(step.step, backend))
        if not isinstance(step, ModelStep):
            return step
        named = backend if step.backend is None else step.backend
        if named is None:
            return step
        found = default_of(find_backend(named, self.router))
        return replace(step, backend=None if found is self._own else found)

    async def target(self, step: ModelStep) -> Target:
        """The model that a resolved step runs on."""
        backend = step.backend
        if backend is None:
            return self.home
        assert not isinstance(backend, str)
        if backend not in self._targets:
            info = await model_info(backend)
            self._targets.setdefault(backend, self._target(backend, info))
        return self._targets[backend]

    def _target(self, backend: Backend, info: ModelInfo) -> Target:
        name = (self.router and self.router.name_of(backend)) or info.name
        given, usual = getattr(backend, "priority", 0), BATCH if self.in_batch else 0
        lora = getattr(backend, "lora", "")
        messages = bool(getattr(backend, "takes_messages", False))
        return Target(info, messages, backend, name, usual if given is None else given, lora)

    @property
    def submitted_options(self) -> Mapping[str, Any]:
        """The options for a graph that a backend runs, its priority and its adapter included."""
        own = {"priority": self.home.priority, "lora": self.home.lora}
        return {**{name: value for name, value in own.items() if value}, **self.options}

    # --- branches ---

    def branch(self, call: Call) -> Branch:
        """Make the program's first branch."""
        return Branch(self, call)

    def branch_key(self) -> str:
        """A key for a new branch."""
        return f"b{next(self._keys)}"

    def fork_key(self, size: int) -> str:
        """A key for a new fork into `size` branches."""
        key = f"f{next(self._keys)}"
        self._open_forks[key] = size
        return key

    def end_branch(self, branch: Branch) -> None:
        """Note that `branch` will not be extended, and with its last branch a fork.

        The hint of the next request carries their keys.
        """
        with self._lock:
            ended = [branch.key]
            for fork in branch.forks[-1:]:
                self._open_forks[fork] -= 1
                if not self._open_forks[fork]:
                    del self._open_forks[fork]
                    ended.append(fork)
            for target in self._targets.values():
                target.ended.extend(ended)

    def take_ended(self, target: Target) -> tuple[str, ...]:
        """The keys of the branches and forks that have ended since the last call for `target`."""
        with self._lock:
            ended, target.ended = tuple(target.ended), []
        return ended

    def count_queued(self, step: Step, change: Literal[1, -1]) -> None:
        """Count a step that was queued or taken out, if it calls a model."""
        if isinstance(bare := step.bare, ModelStep):
            with self._lock:
                self._queued_calls[bare.backend] += change

    def queued_calls(self, target: Target) -> int:
        """Steps in the queues of all branches that will call the model of `target`."""
        return self._queued_calls[None if target is self.home else target.backend]

    # --- the end ---

    def end_body(self, error: BaseException | None = None) -> None:
        """Called when the body has returned or has raised `error`."""
        if error is not None and self.error is None:
            self.error = body_error(error)
        self.body_done.set()
        self.notify()

    async def finish(self) -> None:
        """Wait for all steps, then end the program on the backend. Runs on `loop`."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        if not self._end_sent:
            self._end_sent = True
            for target in self._targets.values():
                try:
                    await target.backend.end_program(self.program)
                except Exception as error:  # the program's leases on pages expire on the backend
                    logger.warning("Program %s could not be ended on its backend: %s", self.program, error)
        if not self.finished.is_set():
            self.root.call.end_s = self.clock()
            self.finished.set()
            self.notify()

    def reject(self, error: ProgramError) -> None:
        """End the run with `error`, before its body is called."""
        self.end_body(error)
        self.root.fail(error)
        self.finished.set()

    async def cancel(self) -> None:
        """Abort the requests in flight; unset variables fail with `cancel_error`. Runs on `loop`.

        Does nothing once the run has finished.
        """
        if self.finished.is_set():
            return
        for task in self.tasks:
            task.cancel()
        self.root.fail(self.cancel_error)
        await self.finish()

    @property
    def cancel_error(self) -> ProgramError:
        """The error of cancelled steps: the body's exception, or a `ProgramError` caused by `Cancelled`."""
        if self.error is not None:
            return self.error
        error = ProgramError("The run was cancelled.")
        error.__cause__ = Cancelled("The run was cancelled.")
        return error

    def request_cancel(self) -> None:
        """Start `cancel` from any thread, without waiting for it."""
        asyncio.run_coroutine_threadsafe(self.cancel(), self.loop)

    def check_may_block(self) -> None:
        """Raise RuntimeError where blocking would stop the body's event loop."""
        if self.asynchronous and not self.finished.is_set():
            raise RuntimeError(
                "This would block the event loop of an async program; there, "
                'write await s.aget("name"), await s.wait(), or s.text_async_iter().'
            )

    # --- progress, for iteration over text ---

    @contextlib.contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` after every change in the block. It must be quick and thread-safe."""
        with self._lock:
            self._listeners = [*self._listeners, wake]
        try:
            yield
        finally:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not wake]

    def notify(self) -> None:
        for wake in self._listeners:
            wake()

    def changes(self) -> Iterator[None]:
        """Yield at once and after every change; blocks in between. Ctrl-C cancels the run."""
        self.check_may_block()
        event = threading.Event()
        with self.listening(event.set):
            while True:
                event.clear()
                yield
                try:
                    while not event.wait(SIGNAL_CHECK_S):
                        pass
                except BaseException:
                    self.request_cancel()
                    raise

    async def async_changes(self) -> AsyncGenerator[None, None]:
        """`changes` for any event loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the listener's loop has closed
                loop.call_soon_threadsafe(event.set)

        with self.listening(wake):
            while True:
                event.clear()
                yield
                await event.wait()


def body_error(error: BaseException) -> ProgramError:
    """The exception of a program's body as a `ProgramError`, of which it is the cause."""
    if isinstance(error, ProgramError):
        return error
    raised = ProgramError(f"The program raised {type(error).__name__}: {error}", line=raised_line(error))
    raised.__cause__ = error
    return raised
