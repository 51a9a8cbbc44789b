"""The run of a program: its backend, options and branches, and its end."""

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

from ramify.errors import Cancelled, InvalidRequest, ProgramError, RamifyError, UnsupportedField, fatal_cause
from ramify.lang.backends.base import Backend
from ramify.lang.backends.model_info import model_info
from ramify.lang.backends.router import Router, default_of, model_of
from ramify.lang.calls.limits import Limits
from ramify.lang.calls.session import Session, Target
from ramify.lang.common.caller import raised_line
from ramify.lang.common.event import Event
from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import OWN, Guarded, ModelStep, On, Step
from ramify.lang.program.place import PLACE, Place
from ramify.lang.program.variables import Variable
from ramify.lang.trace.calls import Call
from ramify.lang.trace.spans import begin_program, end_program
from ramify.loop import SIGNAL_CHECK_S, background_loop, submit
from ramify.model_info import ModelInfo
from ramify.priority import BATCH
from ramify.sampling_options import DEFAULT_MAX_TOKENS

logger = logging.getLogger(__name__)

_default_backend: Backend | None = None


def set_default_backend(backend: Backend | None) -> None:
    """Set the default backend, which every run without a backend of its own uses; None for no default
    backend."""
    global _default_backend
    _default_backend = None if backend is None else _checked(backend)


def find_backend(backend: Backend | str | None, router: Router | None = None) -> Backend:
    """`backend`, or the default backend for None. A name is looked up in `router`. If `router` is None, the
    name is looked up in the router of the surrounding program, or if there is none, in the default backend.
    The result for a name is a copy of the router with the named backend as its default.

    Raises `InvalidRequest` if there is no such backend.
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
    """Call `method` of `backend` (None: the default backend), and wait for the result. Raises
    `UnsupportedField` if the backend lacks the method."""
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
        """The router whose backends steps may choose by name; None if the backend is no router."""
        own = default_of(backend)
        self.home = self._target(own, info)
        """The model of all steps that name no backend. Branches keep their content in the form that this
        model reads."""
        self.own_backend = own
        """Backend of the steps that name no other. `home` has another one while a graph runs remotely."""
        self._targets = {own: self.home}
        self.options = options
        self.default_tokens = DEFAULT_MAX_TOKENS
        """The max_tokens of a step if neither the step nor `options` sets one. It is cut to the bound and to
        the context of the backend."""
        self.limits = limits
        self.asynchronous = asynchronous
        """Whether the body is a coroutine. No read in such a body may block."""
        self.caller_loop = asyncio.get_running_loop() if asynchronous else None
        """The event loop of the body and of its async tools."""
        self.loop = loop or background_loop()
        """The event loop of the steps and of the backend."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One task for each branch that has steps to run. Used only on `loop`."""
        self.error: ProgramError | None = None
        """The error that has ended the body, or the whole run; None if there is none."""
        self.fatal: RamifyError | None = None
        """The `fatal` error that has ended the run; None if there is none. From then on every read raises it,
        and so does `run` at its end, whatever the body has caught."""
        self._around = around
        self.closed = Event()
        """Set when no step can be appended any more: the body has ended, or has submitted a whole graph."""
        self.body_done = Event()
        """Set when the body has returned or raised."""
        self.finished = Event()
        """Set when all steps are done."""
        self._end_sent = False
        self._open_forks: dict[str, int] = {}
        self._queued_calls: Counter[Target | Backend | str | None] = Counter()
        """The `backend` of a step → number of queued steps, of all branches, that will call a model on this
        backend."""
        self._keys = itertools.count()
        self._readers: list[Branch] = []
        self._listeners: list[tuple[Callable[[], None], bool]] = []
        """The arguments of `listening`."""
        self._lock = threading.Lock()
        self.watch: Callable[[Branch, Step, Variable | None], None] | None = None
        """A function that is called with each step when the step is appended; None if there is no such
        function."""
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

    def resolved(self, step: Step, usual: On = OWN) -> Step:
        """`step` with its backend looked up: the backend of the model that `step` names, else of `usual`. The
        step's field is None for the run's own backend and model. Raises `InvalidRequest` or `NotFound` for an
        unknown name, and `UnsupportedNode` for a model on a backend of one model."""
        if isinstance(step, Guarded):
            return replace(step, step=self.resolved(step.step, usual))
        if not isinstance(step, ModelStep):
            return step
        backend, model = step.on.over(usual)
        if backend is None and model is None:
            return step
        found = self.router or self.backend if backend is None else find_backend(backend, self.router)
        found = default_of(found if model is None else model_of(found, model))
        return replace(step, backend=None if found in (self.own_backend, self.backend) else found)

    async def target(self, step: ModelStep) -> Target:
        """The model that `step` runs on. The step must have been resolved."""
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
        """The sampling options for a graph that the backend runs, with the backend's default priority and
        LoRA adapter."""
        own = {"priority": self.home.priority, "lora": self.home.lora}
        return {**{name: value for name, value in own.items() if value}, **self.options}

    # --- branches ---

    def branch(self, call: Call) -> Branch:
        """Make the program's first branch."""
        begin_program(call, self.program)
        return Branch(self, call)

    def branch_key(self) -> str:
        return f"b{next(self._keys)}"

    def fork_key(self, size: int) -> str:
        key = f"f{next(self._keys)}"
        self._open_forks[key] = size
        return key

    def end_branch(self, branch: Branch) -> None:
        """Note that `branch` will not be extended any more. A fork ends with its last branch. The hint of the
        next request to each backend has the keys of the branches and forks that have ended."""
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
        """The keys of the branches and forks that have ended since the last call of this method for
        `target`."""
        with self._lock:
            ended, target.ended = tuple(target.ended), []
        return ended

    def count_queued(self, step: Step, change: Literal[1, -1]) -> None:
        """Count a step that was put into a queue (`change` 1) or taken out (-1), if the step calls a
        model."""
        if isinstance(bare := step.bare, ModelStep):
            with self._lock:
                self._queued_calls[bare.backend] += change

    def queued_calls(self, target: Target) -> int:
        """Number of queued steps of all branches that will call the model of `target`."""
        return self._queued_calls[None if target is self.home else target.backend]

    # --- the end ---

    def close(self) -> None:
        """Refuse further steps. The body may still read results."""
        self.closed.set()
        self.notify()

    def end_body(self, error: BaseException | None = None) -> None:
        """Note that the body has ended. `error` is the exception that it raised; None if it returned. An
        exception after that, such as the cancellation of its task, is no error of the body."""
        if error is not None and self.error is None and not self.body_done.is_set():
            self.error = body_error(error)
        self.body_done.set()
        self.close()

    def note_fatal(self, error: ProgramError) -> bool:
        """Note the `fatal` cause of a step's `error`, here and in the programs around this one. Returns
        whether it is the first one. The caller then calls `fail_all`, without a lock of a branch."""
        cause = fatal_cause(error)
        if cause is None or self.fatal is not None:
            return False
        self.fatal = cause
        self.error = self.error or error
        if self._around is not None and self._around.note_fatal(error):
            self._around.fail_all(error)
        return True

    def fail_all(self, error: ProgramError) -> None:
        """Fail all branches with `error`, so that no further request is sent, and cancel the run."""
        self.root.fail(error)
        self.request_cancel()

    def raise_fatal(self) -> None:
        """Raise the `fatal` error that has ended the run, if there is one."""
        if self.fatal is not None:
            raise self.fatal.with_traceback(None) from None

    async def finish(self) -> None:
        """Wait for all steps, then tell the backends that the program has ended. Runs on `loop`."""
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
            end_program(self.root.call, self.error or self.root.error)
            self.finished.set()
            self.notify()

    def reject(self, error: ProgramError) -> None:
        """End the run with `error`. The run's body must not have been called."""
        self.end_body(error)
        self.root.fail(error)
        end_program(self.root.call, error)
        self.finished.set()

    async def cancel(self) -> None:
        """Abort the requests in flight, and fail all variables without a result, with `cancel_error`. Runs on
        `loop`. Does nothing once the run has finished."""
        if self.finished.is_set():
            return
        for task in self.tasks:
            task.cancel()
        self.root.fail(self.cancel_error)
        await self.finish()

    @property
    def cancel_error(self) -> ProgramError:
        """The error of cancelled steps: `error`, or a `ProgramError` caused by `Cancelled`."""
        if self.error is not None:
            return self.error
        error = ProgramError("The run was cancelled.")
        error.__cause__ = Cancelled("The run was cancelled.")
        return error

    def request_cancel(self) -> None:
        """Start `cancel` from any thread, without waiting for it."""
        asyncio.run_coroutine_threadsafe(self.cancel(), self.loop)

    def check_may_block(self) -> None:
        """Raise RuntimeError if blocking would stop the event loop of an async body."""
        if self.asynchronous and not self.finished.is_set():
            raise RuntimeError(
                "This would block the event loop of an async program; there, "
                'write await s.aget("name"), await s.wait(), or async for (s.text_async_iter(), s.events()).'
            )

    # --- waiting for more decisions ---

    @contextlib.contextmanager
    def reading(self, branch: Branch | None) -> Iterator[None]:
        """A ``with`` block in which the body waits for a result of `branch`, and appends nothing to it. None:
        a reader outside the body."""
        if branch is None:
            yield
            return
        self._readers.append(branch)
        self.notify(reader=True)
        try:
            yield
        finally:
            self._readers.remove(branch)

    def is_read(self, branch: Branch) -> bool:
        """Whether the body waits, and so appends nothing to `branch` meanwhile. A plain function that waits
        appends to no branch."""
        return branch in self._readers or (bool(self._readers) and not self.asynchronous)

    # --- progress, for iteration over text ---

    @contextlib.contextmanager
    def listening(self, wake: Callable[[], None], *, readers: bool = False) -> Iterator[None]:
        """A ``with`` block during which `wake` is called after every change of the run; with `readers` also
        when the body begins to wait. `wake` must be quick and thread-safe."""
        listener = (wake, readers)
        with self._lock:
            self._listeners = [*self._listeners, listener]
        try:
            yield
        finally:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not listener]

    def notify(self, *, reader: bool = False) -> None:
        """Wake the listeners. `reader`: there is a new reader, and no other change. Readers wake no readers,
        else two that iterate would wake each other for ever."""
        for wake, readers in self._listeners:
            if readers or not reader:
                wake()

    def changes(self, reader: Branch | None = None) -> Iterator[None]:
        """Yield at once, and then after every change of the run. Blocks until the next change, in
        ``reading(reader)``. Ctrl-C cancels the run."""
        self.check_may_block()
        event = threading.Event()
        with self.listening(event.set):
            while True:
                event.clear()
                yield
                try:
                    with self.reading(reader):
                        while not event.wait(SIGNAL_CHECK_S):
                            pass
                except BaseException:
                    self.request_cancel()
                    raise

    async def async_changes(
        self, reader: Branch | None = None, *, readers: bool = False
    ) -> AsyncGenerator[None, None]:
        """Yield at once and then after every change of the run, in any event loop; with `readers` also when
        the body begins to wait. Waits in ``reading(reader)``."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the listener's loop has closed
                loop.call_soon_threadsafe(event.set)

        with self.listening(wake, readers=readers):
            while True:
                event.clear()
                yield
                with self.reading(reader):
                    await event.wait()


def body_error(error: BaseException) -> ProgramError:
    """The `ProgramError` for `error`, the exception of a program's body: `error` itself if it is a
    `ProgramError`, else a new one with `error` as its cause."""
    if isinstance(error, ProgramError):
        return error
    raised = ProgramError(f"The program raised {type(error).__name__}: {error}", line=raised_line(error))
    raised.__cause__ = error
    return raised
