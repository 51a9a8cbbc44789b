"""One branch of a program: its content, and the ordered queue of its steps.

Steps are submitted from any thread. A step that does not wait runs at once, in the submitting thread, while
the queue is empty and no task runs. Otherwise the step is queued. One task on the background loop runs the
queue in order, and ends when the queue is empty. The content of the branch is changed only by this task, or
by the submitting thread while there is no task.

    s += "Q: "          runs at once
    s += gen("a")       queued; a task starts and sends the request
    s += "\n"           queued behind it
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ramify.errors import ProgramError
from ramify.lang.calls.limits import LIMITS, Limits, combined
from ramify.lang.common.event import Event
from ramify.lang.program import events
from ramify.lang.program.interpreter import Interpreter
from ramify.lang.program.nodes import (
    OWN,
    Fork,
    Gen,
    ModelStep,
    Node,
    On,
    RoleBegin,
    RoleEnd,
    Splice,
    Step,
    VariableStep,
)
from ramify.lang.program.statement import Statement
from ramify.lang.program.variables import (
    THOUGHTS,
    GatheredVariable,
    ThoughtsVariable,
    Variable,
    unknown_variable,
)
from ramify.lang.prompt.chat import Content, turn
from ramify.lang.prompt.transcript import EMPTY, Piece, Prompt, append_output, text_of
from ramify.lang.prompt.view import View, extended
from ramify.lang.trace.calls import Call

if TYPE_CHECKING:
    from ramify.lang.calls.request import Output
    from ramify.lang.calls.session import Target
    from ramify.lang.program.run import Run


DROPPED = ("gen", "select", "decide", "tool")
"""The kinds of calls whose text `recover` removes. Forks and programs have content of their own."""

Entry = tuple[Step, Variable | None, Statement]
"""A queued step, the variable that it sets, and its statement."""


class Branch:
    """The content and the steps of a program, or of one branch of a fork."""

    def __init__(
        self, run: Run, call: Call, parent: Branch | None = None, forks: tuple[str, ...] = ()
    ) -> None:
        self.run = run
        self.call = call
        self.key = run.branch_key()
        self.path: events.Path = () if parent is None else (*parent.path, len(parent.children))
        """The place among the branches of the run, as events tell it."""
        self.events: list[events.Event] = []
        """The events of this branch and of all branches forked from it, in order. Only appended to, so that
        each reader keeps an index."""
        self._logs: tuple[list[events.Event], ...] = (*(parent._logs if parent else ()), self.events)
        """The `events` of the branches that this one comes from, outermost first, and of this one."""
        self.texts: list[str] = []
        """The texts of this branch's own events. Only appended to."""
        self.texts_before: tuple[tuple[list[str], int], ...] = ()
        """For each branch that this one comes from, outermost first: its `texts`, and their number at the
        fork. Empty before the fork is reached."""
        self.forks = forks
        """The keys of the forks that the branch comes from, outermost first."""
        self.content = Content()
        self.fork_point: Piece | None = None
        """The last piece before the fork. Pieces after it belong to this branch alone. None for a branch that
        was not forked."""
        self.fork_told = False
        """Whether a request of this branch has told the runtime the place of the fork in the prompt."""
        self._prompt = EMPTY
        """The last prompt sent to the run's own model, which the next prompt to that model continues."""
        self._views: dict[Target, View[Target]] = {}
        """Model → the content as that model reads it, up to the last step that called the model. The run's
        own model has no entry."""
        self.scopes: dict[str, Piece | None] = {}
        self.variables: dict[str, Variable] = {} if parent is None else dict(parent.variables)
        self._inherited = dict(self.variables)
        self.children: list[Branch] = []
        self.running: Variable | None = None
        """The variable that the running step sets; None if no step runs, or if the step sets no variable."""
        self.error: ProgramError | None = None
        self._failed: Statement | None = None
        """The statement that raised `error`; None if the error came from outside the branch, such as an error
        of the parent or a cancellation."""
        self._block: Statement | None = None
        """The innermost ``with`` block of this branch that the body is in."""
        self.limits: Limits = ()
        self._inherited_limits = run.limits if parent is None else parent._limits_here()
        self.joined = False
        self._end_noted = False
        self._interpreter = Interpreter(self)
        self._queue: deque[Entry] = deque()
        self._lock = threading.RLock()
        self._busy = parent is not None
        """Whether a task runs the queue or will run it. True also before the parent has reached the fork."""
        self._idle: Event | None = None

    # --- submitting steps ---

    def submit(self, node: Node, usual: On = OWN) -> Variable | None:
        """Submit the steps of `node`, which run after all earlier steps. Returns the variable that the last
        step sets, or None if it sets no variable. Does not wait.

        `usual` has the backend and the model of steps that name none.
        """
        return self._submit_all(node, Statement(self._block, self._limits_here()), usual)

    @contextlib.contextmanager
    def block(self, begin: Node, end: Node) -> Iterator[None]:
        """A ``with`` block, which submits `begin` at its beginning and `end` at its end. For `recover`, the
        whole block is one statement."""
        block = self._block = Statement(self._block, self._limits_here(), block=True)
        self._submit_all(begin, block)
        try:
            yield
        finally:
            block.open, self._block = False, block.outer
        self._submit_all(end, block)

    def _limits_here(self) -> Limits:
        return combined(self._inherited_limits, LIMITS.get())

    def _submit_all(self, node: Node, statement: Statement, usual: On = OWN) -> Variable | None:
        steps = [self.run.resolved(step, usual) for step in node.steps()]
        variable = None
        for step in steps:
            variable = self._submit(step, statement)
        return variable

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A ``with`` block in which submitted steps are only queued. The queued steps start at the end of the
        block. The branch must be idle."""
        self._busy = True
        try:
            yield
        finally:
            self.run.loop.call_soon_threadsafe(self._start)

    def _declare(self, step: Step) -> Variable | None:
        """Make the variable that `step` sets; None if `step` sets no variable. Raises `ProgramError` if the
        branch has ended, and the `fatal` error of the run."""
        self.run.raise_fatal()
        if self.joined or self.run.closed.is_set():
            raise ProgramError(f"Nothing can be appended to this state: {self._why_ended()}.")
        if not isinstance(step.bare, VariableStep):
            return None
        variable, name = Variable(step.variable), step.variable
        if name is not None:
            self.variables[name] = variable
            if isinstance(step, Gen) and step.separate:
                self.variables[name + THOUGHTS] = ThoughtsVariable(variable)
        return variable

    def _why_ended(self) -> str:
        return "it was joined" if self.joined else "its program has ended"

    def _submit(self, step: Step, statement: Statement) -> Variable | None:
        with self._lock:
            variable = self._declare(step)
            if self.run.watch is not None:
                self.run.watch(self, step, variable)
            if self.error is not None:
                self._skip(step, variable, self.error)
            elif self._busy:
                self._enqueue(step, variable, statement)
            elif step.waits:
                self._enqueue(step, variable, statement)
                self._busy = True
                self.run.loop.call_soon_threadsafe(self._start)
            else:
                try:
                    statement.note_before(self)
                    self._interpreter.visit(step, variable)
                except Exception as error:
                    self._fail(_as_program_error(error, step), variable, statement)
        self.run.notify()
        return variable

    def fork(self, size: int) -> list[Branch]:
        """Fork into `size` branches, which begin with the content that this branch has after its steps so
        far."""
        with self._lock:
            forks = (*self.forks, self.run.fork_key(size))
            first = len(self.children)
            for index in range(size):
                self.children.append(Branch(self.run, Call("fork", f"fork {index}"), self, forks))
            children = self.children[first:]
            self.submit(Fork(tuple(children)))
        return children

    def start_at_fork(self, parent: Branch) -> None:
        """Take the content of `parent`, and start the queued steps. Called when the parent has reached the
        fork."""
        with self._lock:
            self.content, self._prompt = parent.content, parent._prompt
            self.fork_point = parent.content.tail
            self._views = dict(parent._views)
            self.call.start_s = self.run.clock()
            self.texts_before = (*parent.texts_before, (parent.texts, len(parent.texts)))
            if self._queue:
                self.run.loop.call_soon_threadsafe(self._start)
            else:
                self._become_idle()

    def gather(self, children: Iterable[Branch]) -> None:
        """Close the children. For each variable that children have set, this branch gets a variable of the
        same name, whose value is the list of the children's values."""
        children = list(children)
        for child in children:
            child.close()
        parts: dict[str, list[Variable]] = {}
        for child in children:
            for name, variable in child.variables.items():
                if child._inherited.get(name) is not variable:
                    parts.setdefault(name, []).append(variable)
        for name, variables in parts.items():
            self.variables[name] = GatheredVariable(name, variables)
        self.run.notify()

    def splice(self, children: Iterable[Branch]) -> None:
        """Close the children, and append to this branch the content that each child has added, in order."""
        children = tuple(children)
        for child in children:
            child.close()
        self.submit(Splice(children))

    def close(self) -> None:
        """Reject further steps."""
        with self._lock:
            self.joined = True
            self._end_if_complete()

    def _enqueue(self, step: Step, variable: Variable | None, statement: Statement) -> None:
        self._queue.append((step, variable, statement))
        self.run.count_queued(step, 1)

    def _dequeue(self) -> Entry:
        entry = self._queue.popleft()
        self.run.count_queued(entry[0], -1)
        return entry

    def take_next(self, fits: Callable[[Step, Statement], bool]) -> Entry | None:
        """Take the next step out of the queue, if there is one and it `fits`, for the step that runs."""
        with self._lock:
            if not self._queue or not fits(self._queue[0][0], self._queue[0][2]):
                return None
            entry = self._dequeue()
            entry[2].note_before(self)
            return entry

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Undo `take_next` of these steps, in their order."""
        with self._lock:
            for entry in reversed(list(entries)):
                self._queue.appendleft(entry)
                self.run.count_queued(entry[0], 1)

    @property
    def may_grow(self) -> bool:
        """Whether the body may append the next step soon. False if a step is queued, if the body waits for a
        result, and if no step can be appended any more."""
        closed = self.joined or self.run.closed.is_set() or self.error is not None
        return not (self._queue or closed or self.run.is_read(self))

    # --- running them ---

    def _start(self) -> None:
        task = self.run.loop.create_task(self._drain())
        self.run.tasks.add(task)
        task.add_done_callback(self.run.tasks.discard)

    async def _drain(self) -> None:
        step: Step | None = None
        variable: Variable | None = None
        statement: Statement | None = None
        try:
            while (entry := self._next()) is not None:
                step, variable, statement = entry
                statement.note_before(self)
                self.running = variable
                waiting = self._interpreter.visit(step, variable)
                if waiting is not None:
                    await waiting
        except asyncio.CancelledError:
            self._fail(self.run.cancel_error, variable)
        except Exception as error:
            self._fail(_as_program_error(error, step), variable, statement)

    def _next(self) -> Entry | None:
        with self._lock:
            if self._queue:
                return self._dequeue()
            self._become_idle()
            return None

    def _become_idle(self) -> None:
        self._busy, self.running = False, None
        self._end_if_complete()
        self.call.end_s = self.run.clock()
        if self._idle is not None:
            self._idle.set()
            self._idle = None
        self.run.notify()

    def _end_if_complete(self) -> None:
        if self.joined and not self._busy and not self._end_noted:
            self._end_noted = True
            self.run.end_branch(self)

    def returns_to(self, target: Target) -> bool:
        """Whether the branch is expected to call `target` soon: either a queued step calls `target`, or steps
        are queued and no queued step calls a model."""
        own = None if target is self.run.home else target.backend
        with self._lock:
            others = False
            for step, _, _ in self._queue:
                if isinstance(bare := step.bare, ModelStep):
                    if bare.backend is own:
                        return True
                    others = True
            return bool(self._queue) and not others

    @property
    def is_last_step(self) -> bool:
        """Whether no step can follow the running step."""
        return not self._queue and (self.joined or self.run.closed.is_set())

    # --- failing ---

    def fail(self, error: Exception) -> None:
        """Fail this branch and all branches forked from it with `error`. A branch that has failed before
        keeps its error."""
        with self._lock:
            if self.error is None:
                self._fail(_as_program_error(error, None), None)
        for child in self.children:
            child.fail(error)

    def _fail(
        self, error: ProgramError, variable: Variable | None, statement: Statement | None = None
    ) -> None:
        ends_run = self.run.note_fatal(error)
        with self._lock:
            if self.error is None:
                self.error, self._failed = error, statement
                self.call.error = str(error)
            if variable is not None:
                variable.fail(error)
            while self._queue:
                skipped, result, _ = self._dequeue()
                self._skip(skipped, result, self.error)
            self._become_idle()
        if ends_run:
            self.run.fail_all(error)

    def recover(self) -> ProgramError:
        """Reset the branch to the content before the statement that failed, and return the error.

        Raises `ProgramError` if nothing has failed, if the branch has ended, or if the error came from
        outside the branch.
        """
        with self._lock:
            if self.joined or self.run.closed.is_set():
                raise ProgramError(f"This state cannot be recovered: {self._why_ended()}.")
            if self.error is None:
                return self._failed_gather()
            if self._failed is None:
                raise ProgramError(
                    f"This state cannot be recovered, because no step of its own has failed: {self.error}",
                    remedy="Recover the state that it was forked from, and fork again.",
                )
            before = self._failed.closed().before
            assert before is not None
            self.content, self.scopes = before[0], dict(before[1])
            error, self.error, self._failed = self.error, None, None
            self.call.error = None
            self._note_recover(error, before[2])
            return error

    def unnoticed_error(self) -> ProgramError | None:
        """The first error, of the branches forked from this one, that was neither raised nor returned in the
        program's body; None if there is no such error."""
        for child in self.children:
            if child.error is not None and not child.error.noticed:
                return child.error
            if (found := child.unnoticed_error()) is not None:
                return found
        return None

    def _failed_gather(self) -> ProgramError:
        """The error of the first gathered variable that has failed. Joining variables does not change the
        content of this branch, so nothing is reset. Raises `ProgramError` if no gathered variable has
        failed."""
        for variable in self.variables.values():
            if isinstance(variable, GatheredVariable) and variable.error is not None:
                variable.error.notice()
                self._note_recover(variable.error, len(self.call.children))
                return variable.error
        raise ProgramError(
            "There is nothing to recover from: no step of this state has failed.",
            remedy="Read the variable first, which waits for its step." if self._busy else None,
        )

    def _note_recover(self, error: ProgramError, kept: int) -> None:
        """Note the event, and add a `recover` to the trace, which keeps the branch's first `kept` calls and
        drops the others."""
        self.note(events.Recovered(error, self.path))
        undone = self.call.children[kept:]
        gone = {id(call) for before in undone for call in before.dropped}
        call = self.call.child("recover", error.variable or "", None, self.run.clock(), line=error.line)
        call.end_s, call.text = call.start_s, str(error.__cause__ or error)
        call.dropped = tuple([one for one in undone if one.kind in DROPPED and id(one) not in gone])

    def _skip(self, step: Step, variable: Variable | None, error: ProgramError) -> None:
        skipped = ProgramError(
            f"{_name(step)} was not run, because an earlier step failed: {error.message}",
            variable=step.variable,
            line=error.line,
            prompt=error.prompt,
            partial=error.partial,
            finish_reason=error.finish_reason,
        )
        skipped.__cause__ = error
        if variable is not None:
            variable.fail(skipped)
        if isinstance(step, Fork):
            for child in step.children:
                child.fail(error)

    # --- the content for a model ---

    def view(self, target: Target, content: Content | None = None) -> View[Target]:
        """`content` (None: that of the branch) as `target` reads it. Raises the errors of `extended`."""
        content = content or self.content
        if target is self.run.home:
            return View(target, content, content.tail, self._prompt)
        return extended(self._views.get(target) or View(target, Content(), None), content.tail)

    def remember(self, view: View[Target], prompt: Prompt) -> None:
        """Keep `view`, and its prompt `prompt`, which is being sent. The next prompt for the model of `view`
        continues `prompt`."""
        if view.until is not self.content.tail:
            return
        if view.target is self.run.home:
            self._prompt = prompt
        else:
            self._views[view.target] = view._replace(prompt=prompt)

    def after(self, content: Content, output: Output) -> Content:
        """`content` with `output` appended."""
        home, ids, text, kept_ids = self.run.home, output.ids, output.text, output.kept_ids
        thought = output.thought
        if thought is not None:
            content = thought.append(content, home)
            before = len(thought.ids)
            ids, text = ids[before:], text.removeprefix(thought.head)
            kept_ids = kept_ids - before if before or not thought.text else 0
        by = None if output.target is home else output.target
        return content.at(append_output(content.tail, text, ids, kept_ids, output.tail, by))

    # --- reading ---

    def note(self, *noted: events.Event) -> None:
        """Add events of this branch, and wake the readers."""
        for event in noted:
            if isinstance(event, events.Appended | events.Text | events.CallText):
                self.texts.append(event.text)
            for log in self._logs:
                log.append(event)
        self.run.notify()

    def subtree(self) -> Iterator[Branch]:
        """This branch, and all branches forked from it so far."""
        yield self
        for child in self.children:
            yield from child.subtree()

    def idle(self) -> Event:
        """An event that is set when all steps submitted so far are done."""
        with self._lock:
            if self._idle is not None:
                return self._idle
            event = Event()
            if self._busy:
                self._idle = event
            else:
                event.set()
            return event

    @property
    def text(self) -> str:
        """The content as text."""
        return text_of(self.content.tail)

    @property
    def ended(self) -> bool:
        """Whether no step runs, and no further step can be submitted."""
        return not self._busy and (self.joined or self.run.closed.is_set())

    def variable(self, name: str) -> Variable:
        """The variable `name`. If there is no such variable, raises the error of the program's body, or
        `UnknownVariable` if the body has no error."""
        found = self.variables.get(name)
        if found is not None:
            return found
        self.run.raise_fatal()
        if self.run.error is not None:
            raise self.run.error.with_traceback(None)
        raise unknown_variable(name, list(self.variables))

    def set_variable(self, name: str, value: Any) -> None:
        variable = Variable(name)
        variable.resolve(value, text=value if isinstance(value, str) else None)
        self.variables[name] = variable


def _name(step: Step) -> str:
    if step.variable is not None:
        return repr(step.variable)
    if isinstance(step, RoleBegin | RoleEnd):
        return turn(step.role).capitalize()
    return f"A {type(step).__name__.lower()} step"


def _as_program_error(error: Exception, step: Step | None) -> ProgramError:
    if isinstance(error, ProgramError):
        return error
    line = getattr(step, "line", None)
    where = f" at {line}" if line else ""
    failed = ProgramError(
        f"{_name(step) if step is not None else 'A step'} failed{where}: {error}",
        variable=step.variable if step is not None else None,
        line=line,
    )
    failed.__cause__ = error
    return failed
