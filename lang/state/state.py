"""The program state `s`: the body appends to it and reads from it, and `run` returns it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Generic, Literal, NoReturn, Self, Unpack, overload

from typing_extensions import TypeForm, TypeVar

import ramify.graph as graph
from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.backends.base import Backend
from ramify.lang.common.caller import caller_line
from ramify.lang.common.event import Event
from ramify.lang.common.unsupported import unsupported
from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import (
    OWN,
    CallTools,
    Node,
    On,
    RoleBegin,
    RoleEnd,
    Row,
    ScopeBegin,
    ScopeEnd,
    VariableStep,
    as_node,
    name_of,
)
from ramify.lang.program.variables import Variable
from ramify.lang.state import streaming
from ramify.lang.state.display import follow, in_notebook, show, state_html
from ramify.lang.state.fork import ForkGroup
from ramify.lang.state.streaming import EventStream, ObjectStream, snapshot
from ramify.lang.tools.tool import ToolCalls, ToolTurn, as_tools, descriptions_of
from ramify.lang.trace.calls import Call
from ramify.lang.typed.decision import Decision, ModelDecision
from ramify.lang.typed.partial import Partial
from ramify.lang.typed.schema import convert, schema_of
from ramify.messages import Usage
from ramify.sampling_options import SamplingKeywords, read_options
from ramify.spelling import check_word

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True, default=Any)


class ProgramState(Generic[R_co]):
    """A running or finished program, or one branch of a fork. `R_co` is the type of `ret_value`.

    Appending returns at once. Reading a variable waits only for the step that sets it; `text`, `messages`,
    `error` and `sync` wait for all steps so far. An ``async def`` program, which must not block its event
    loop, uses ``await s.aget("x")`` and ``await s.wait()`` instead.

    Wherever a variable's name is taken, its step can be given as well: after ``score = rm.gen("score",
    schema=int)``, ``s[score]`` is ``s["score"]``, and type checkers know that it is an int.
    """

    def __init__(self, branch: Branch, *, outside: bool = False, usual: On = OWN) -> None:
        self._branch = branch
        self._usual = usual
        """Backend and model of steps that are appended through this object and name none."""
        self._outside = outside
        """Whether the object belongs to the caller of `run`, and not to the body. While the caller reads, the
        body may still make variables."""
        self._body: asyncio.Task[None] | None = None
        self._returned: list[Any] = []
        """The return value of the body, once it has returned; else empty."""

    # --- appending ---

    def __iadd__(self, item: str | Node) -> Self:  # type: ignore[misc]
        self._submit(as_node(item))
        return self

    def __add__(self, item: object) -> NoReturn:
        raise TypeError("A state is appended to in place: write s += …, not s = s + ….")

    def _submit(self, node: Node) -> Variable | None:
        return self._branch.submit(node, self._usual)

    def system(self, content: str | Node | None = None) -> contextlib.AbstractContextManager[None]:
        return self._turn("system", content)

    def user(self, content: str | Node | None = None) -> contextlib.AbstractContextManager[None]:
        return self._turn("user", content)

    def assistant(self, content: str | Node | None = None) -> contextlib.AbstractContextManager[None]:
        return self._turn("assistant", content)

    def _turn(self, role: str, content: str | Node | None) -> contextlib.AbstractContextManager[None]:
        """Append a turn with `content`. If `content` is None, return a ``with`` block; the text and steps
        that are appended in the block become the turn's content."""
        line = caller_line()
        if content is None:
            return self._branch.block(RoleBegin(role, line), RoleEnd(role))
        self._submit(Row((RoleBegin(role, line), *as_node(content).steps(), RoleEnd(role))))
        return contextlib.nullcontext()

    def var_scope(self, name: str | VariableStep) -> contextlib.AbstractContextManager[None]:
        """A ``with`` block. The text that is appended in it becomes the value of the variable `name`."""
        name = name_of(name)
        return self._branch.block(ScopeBegin(name), ScopeEnd(name))

    def call_tools(
        self,
        tools: Sequence[object],
        name: str | None = None,
        max_tokens: int | None = None,
        *,
        max_calls: int = 4,
        required: bool = True,
        errors: Literal["show", "raise"] = "show",
        timeout: float | None = None,
        backend: Backend | str | None = None,
        model: str | None = None,
        priority: int | None = None,
        lora: str | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> ToolTurn:
        """Generate calls of `tools`, run them, and append their results. Returns at once.

        The generated calls are constrained to the names and schemas of the tools. All calls run concurrently:
        coroutine functions in the program's event loop, each call of a plain function in a thread of its own.
        In a chat the calls are an assistant turn. The results follow in the order of the calls: one turn for
        each result, or a single user turn if the model's chat template has no turns for results.

        Args:
            tools: Functions, or tools made by `tool`. Describe them to the model before, with the argument
                ``tools=`` of `system` or `user`.
            name: The variable that holds the `ToolCalls`.
            max_calls: Most calls in this turn.
            required: True (the default) makes the model write at least one call. With False the model may
                answer in words, without any call.
            errors: ``show``: if a function raises an exception, the model is shown the exception as the
                result of the call. ``raise``: the exception fails the step.
            timeout: Seconds for the generation of the calls. The functions have timeouts of their own
                (`tool`).
            backend, model, priority, lora: The same as for `gen`.
            options: The same as for `gen`.
        """
        check_word("errors", errors, ("show", "raise"))
        if max_calls < 1:
            raise InvalidRequest(f"max_calls is {max_calls}; it must be at least 1.", field="max_calls")
        found = as_tools(tools)
        node = graph.CallTools(
            name=name,
            tools=descriptions_of(found),
            max_calls=max_calls,
            required=required,
            options=read_options({"max_tokens": max_tokens, **options}, of="call_tools"),
            timeout=timeout,
            priority=priority,
            lora=lora,
            model=model,
        )
        step = CallTools(node.checked(), found, errors == "raise", backend=backend, line=caller_line())
        variable = self._submit(step)
        assert variable is not None

        def read() -> ToolCalls:
            self._block_on(variable.ready)
            calls: ToolCalls = self._value(variable)
            return calls

        return ToolTurn(variable.ready, read)

    def set_var(self, name: str | VariableStep, value: Any) -> None:
        """Set a variable; ``s[name] = value`` does the same."""
        self._branch.set_variable(name_of(name), value)

    __setitem__ = set_var

    def recover(self) -> ProgramError:
        """Reset the state to the content before the statement whose step has failed. Returns the error; never
        blocks.

        The statement is everything that was appended together with the step (``s += a + b``), or, if
        `recover` is called after a ``with`` block around the step, the whole block. Content, turns and scopes
        become those before the statement, so the next prompt begins with exactly the same tokens. The
        variables of the failed step, and of the steps that were skipped after it, stay failed until they are
        set again. Calls of tools are not undone, and text that was streamed stays in the stream. If a join of
        failed branches failed, the state becomes that before the join.

        Raises `ProgramError` if no step of this state has failed, or if the program has ended.
        """
        self._branch.run.raise_fatal()
        return self._branch.recover()

    # --- branches ---

    def fork(self, size: int = 1, position_ids_offset: None = None) -> ForkGroup:
        """Fork the state into `size` branches, which share the content so far and run concurrently."""
        if position_ids_offset is not None:
            unsupported("fork(position_ids_offset=...)", "Fork without it.")()
        if size < 1:
            raise ValueError(f"fork size is {size}; it must be at least 1.")
        branches = self._branch.fork(int(size))
        return ForkGroup([self._at(branch) for branch in branches], self._branch)

    def _at(self, branch: Branch) -> Self:
        return type(self)(branch, usual=self._usual)

    def _on(self, given: On) -> Self:
        return type(self)(self._branch, usual=given.over(self._usual))

    @contextlib.contextmanager
    def copy(self) -> Iterator[ProgramState]:
        """A ``with`` block with a fork into one branch, which is the block's variable. At the end of the
        block the branch is joined: its variables are gathered, and its content is dropped."""
        group = self.fork(1)
        yield group[0]
        group.join()

    # --- reading ---

    @property
    def ret_value(self) -> R_co:
        """The return value of the body. Waits until the body has returned. Raises `ProgramError` if the body
        failed, or if the state is a branch or belongs to the running body."""
        if self._outside:
            self._block_on(self._branch.run.body_done)
        if not self._returned:
            raise self._branch.run.error or ProgramError("Only the state that run returns has a ret_value.")
        returned: R_co = self._returned[0]
        return returned

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: VariableStep[T]) -> T: ...
    def __getitem__(self, name: str | VariableStep) -> Any:
        """The value of the variable `name`. Waits for the step that sets it. Raises `ProgramError` if that
        step failed, or if no step sets the variable."""
        return self._value(self._read(name))

    get_var = __getitem__

    @overload
    def get(self, name: str | VariableStep, kind: TypeForm[T]) -> T: ...
    @overload
    def get(self, name: VariableStep[T]) -> T: ...
    @overload
    def get(self, name: str | VariableStep, kind: Any = None) -> Any: ...
    def get(self, name: str | VariableStep, kind: Any = None) -> Any:
        """The value of the variable `name` as a value of the type `kind`. A value of another type is parsed
        from the variable's text, or converted if the variable has no text. `kind` None: the value as it
        is."""
        return self._value(self._read(name), kind)

    @overload
    async def aget(self, name: str | VariableStep, kind: TypeForm[T]) -> T: ...
    @overload
    async def aget(self, name: VariableStep[T]) -> T: ...
    @overload
    async def aget(self, name: str | VariableStep, kind: Any = None) -> Any: ...
    async def aget(self, name: str | VariableStep, kind: Any = None) -> Any:
        """The value that `get` returns, for async programs."""
        name = name_of(name)
        if not self._declared(name):
            async with contextlib.aclosing(self._branch.run.async_changes()) as changes:
                async for _ in changes:
                    if self._declared(name):
                        break
        variable = self._branch.variable(name)
        await self._wait_for(variable.ready)
        return self._value(variable, kind)

    def thinking(self, name: str | VariableStep) -> Any:
        """The model's thoughts before the value of a variable: a text, or a list of texts if the value is a
        list. A text is empty if the model did not think.

        Waits for the step of the variable; an async program must await `aget` first. Raises `InvalidRequest`
        for a `gen` without ``thinking=``.
        """
        return self._read(name).read_thinking()

    def get_meta_info(self, name: str | VariableStep) -> Any:
        """Tokens, finish reason and log-probabilities of the variable's step, as SGLang's ``meta_info``."""
        variable = self._read(name)
        variable.read()
        return variable.meta

    def prompt_of(self, name: str | VariableStep) -> str:
        """The exact prompt of the request for the variable `name`, even if the step failed. With retries it
        is the prompt of the last attempt. Raises `ProgramError` for a variable without a request."""
        variable = self._read(name)
        if variable.call is None:
            variable.read()
            name = name_of(name)
            raise ProgramError(f"{name!r} was not generated, so it has no prompt.", variable=name)
        return variable.call.prompt

    def __contains__(self, name: str | VariableStep) -> bool:
        return name_of(name) in self._branch.variables

    def text(self) -> str:
        """All text so far: appended text, the marks of chat turns, and generated text. Raises `ProgramError`
        if a step failed."""
        self.sync()
        self._raise()
        return self._branch.text

    def messages(self) -> list[dict[str, str]]:
        """The finished chat turns, as ``{"role": …, "content": …}``. Raises `ProgramError` if a step
        failed."""
        self.sync()
        self._raise()
        messages = self._branch.content.dialogue.messages
        return [{"role": turn.role, "content": turn.content} for turn in messages]

    def sync(self) -> None:
        """Block until all steps so far are done. For a state returned by `run`, block until the program is
        done."""
        self._block_on(self._all_done())

    async def wait(self) -> None:
        """Wait as `sync` does, for async programs."""
        await self._wait_for(self._all_done())

    def error(self) -> ProgramError | None:
        """The error of this branch, else of the program's body, else of a branch forked from this one; None
        if there is no error. An error of a forked branch no longer counts once it has been raised or returned
        in the body."""
        self.sync()
        error = self._error()
        if error is not None and not self._outside:
            error.notice()
        return error

    def text_iter(
        self, var_name: str | VariableStep | None = None, *, thinking: bool = False
    ) -> Iterator[str]:
        """Yield the text of one variable, or without `var_name` all text, while it is generated. Raises
        `ProgramError` at the end if a step failed. In the body the iteration ends when the steps so far are
        done.

        Without ``run(stream=True)`` the text is yielded in one piece when it is complete. With `thinking`,
        the thoughts before the variable's value are yielded instead. The iteration ends at the first text of
        the value.
        """
        name = None if var_name is None else name_of(var_name)
        return streaming.text_iter(self, name, thinking)

    def text_async_iter(
        self,
        var_name: str | VariableStep | None = None,
        return_meta_data: bool = False,
        *,
        thinking: bool = False,
    ) -> AsyncIterator[Any]:
        """Yield as `text_iter` does, in any event loop. With `return_meta_data`, yield pairs of text and
        ``meta_info``."""
        name = None if var_name is None else name_of(var_name)
        return streaming.text_async_iter(self, name, return_meta_data, thinking)

    @overload
    def stream_objects(self, name: str | VariableStep, kind: TypeForm[T]) -> ObjectStream[T]: ...
    @overload
    def stream_objects(self, name: VariableStep[T]) -> ObjectStream[T]: ...
    @overload
    def stream_objects(self, name: str | VariableStep, kind: Any = None) -> ObjectStream[Any]: ...
    def stream_objects(self, name: str | VariableStep, kind: Any = None) -> ObjectStream[Any]:
        """The partial values of the variable while it is generated, to iterate over with ``for`` or
        ``async for``: a `Partial` after each change. The last `Partial` has the complete value.

        Each value inside a partial value is validated when it is closed, against its own type or subschema.
        An invalid value raises `ProgramError`. `gen` validates the complete value again. `kind` is a type or
        JSON schema, by default the schema of the `gen`. Only the complete value is yielded for types that are
        not generated as JSON (such as ``int`` or a `Literal` of strings), for a `gen` with retries
        or with `n` above 1, and in runs without ``stream=True``.
        """
        return ObjectStream(self, name_of(name), kind)

    def events(self) -> EventStream:
        """The events of this state and of all branches forked from it, as they happen, to iterate over with
        ``for`` or ``async for``: see `ramify.events`.

        Events of one branch come in order. Every iteration has all events, from the first. It ends when all
        steps so far are done, and then raises `ProgramError` if a step failed and was not recovered, or the
        body raised. Without ``run(stream=True)`` the text of a step comes in one piece, when it is complete.
        """
        return EventStream(self)

    @overload
    def partial(self, name: str | VariableStep, kind: TypeForm[T]) -> Partial[T]: ...
    @overload
    def partial(self, name: VariableStep[T]) -> Partial[T]: ...
    @overload
    def partial(self, name: str | VariableStep, kind: Any = None) -> Partial[Any]: ...
    def partial(self, name: str | VariableStep, kind: Any = None) -> Partial[Any]:
        """The latest `Partial` of the variable, as `stream_objects` would yield it. Does not wait."""
        self._branch.run.raise_fatal()
        return snapshot(self, name_of(name), kind)

    @property
    def usage(self) -> Usage:
        """The sum of tokens and times over all requests of this state and its branches."""
        return self._branch.call.usage

    @property
    def usage_by_model(self) -> dict[str, Usage]:
        """Name → usage, for each model in the order of first use. The name is the backend's name in the
        `Router`; without a router, the model's name."""
        return self._branch.call.usage_by_model

    @property
    def trace(self) -> Call:
        """The tree of calls of this state. It can be printed."""
        return self._branch.call

    def show(self) -> None:
        """Show the program while it runs, and wait until its steps are done. A notebook shows the turns,
        variables and usage, updated in place; elsewhere the text is printed while it is generated. Only a run
        with ``stream=True`` can be seen while it runs.

        For a running async program the call returns at once, and a thread shows the state.
        """
        show(self)

    def _repr_html_(self) -> str:
        return state_html(self)

    def _ipython_display_(self) -> None:
        if self._all_done().is_set() or not in_notebook():
            raise NotImplementedError  # IPython then shows static HTML or text
        follow(self)

    def cancel(self) -> None:
        """Abort the program and its requests in flight. Unfinished steps fail with `Cancelled` as the
        cause."""
        self._branch.run.request_cancel()

    @property
    def _status(self) -> str:
        branch = self._branch
        return "failed" if self._error() else "ended" if branch.ended else "running"

    def __repr__(self) -> str:
        branch = self._branch
        return f"<ProgramState {branch.run.root.call.name} {self._status} {sorted(branch.variables)}>"

    # --- waiting ---

    def _read(self, name: str | VariableStep) -> Variable:
        name = name_of(name)
        if not self._declared(name):
            for _ in self._branch.run.changes():
                if self._declared(name):
                    break
        variable = self._branch.variable(name)
        self._block_on(variable.ready)
        return variable

    def _value(self, variable: Variable, kind: Any = None) -> Any:
        try:
            return _as(variable, kind)
        except ProgramError as error:
            if not self._outside:
                error.notice()
            raise

    def _error(self) -> ProgramError | None:
        branch = self._branch
        return branch.error or branch.run.error or branch.unnoticed_error()

    def _declared(self, name: str) -> bool:
        """Whether a read of the variable waits for no step that makes it: the variable exists, or the run is
        closed, or the reader is the body, which makes none meanwhile."""
        run = self._branch.run
        return not self._outside or name in self._branch.variables or run.closed.is_set()

    def _all_done(self) -> Event:
        return self._branch.run.finished if self._outside else self._branch.idle()

    def _block_on(self, event: Event) -> None:
        """Block until `event` is set. Raises the `fatal` error of the run, as all waits do."""
        run = self._branch.run
        if not event.is_set():
            run.check_may_block()
            try:
                with run.reading(self._reader):
                    event.block()
            except BaseException:  # Ctrl-C
                run.request_cancel()
                raise
        run.raise_fatal()

    async def _wait_for(self, event: Event) -> None:
        """Wait as `_block_on` does, in any event loop."""
        run = self._branch.run
        with run.reading(self._reader):
            await event.wait()
        run.raise_fatal()

    @property
    def _reader(self) -> Branch | None:
        """The branch that the body reads through this object; None outside the body."""
        return None if self._outside else self._branch

    def _raise(self) -> None:
        error = self._branch.error or self._branch.run.error
        if error is not None:
            raise error.with_traceback(None)


def _as(variable: Variable, kind: Any) -> Any:
    value = variable.read()
    if kind is None or (isinstance(kind, type) and type(value) is kind):
        return value
    if isinstance(value, Decision | ModelDecision):
        return convert(value.value, kind)
    if variable.text is None:
        return convert(value, kind)
    return schema_of(kind).parse(variable.text)
