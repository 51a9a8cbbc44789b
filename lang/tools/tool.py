"""Tools, which are functions that a model may call, and calls of tools.

Schemas are made from signatures and docstrings.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NotRequired, ParamSpec, Required, TypeVar, cast, overload

from ramify.errors import InvalidConstraint, InvalidRequest, RequestTimeout
from ramify.graph import ToolDescription
from ramify.json_text import read_json
from ramify.lang.common.caller import caller_names
from ramify.lang.common.event import Event
from ramify.lang.typed.adapters import modern
from ramify.tool_calls.grammar import Tool as DescribedTool

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Pattern of the names of functions that OpenAI's API and most chat templates accept."""


class Tool(Generic[P, R]):
    """A function, plain or ``async``, with the name, description and schema that a model is shown; made by
    `tool`, `Tool.from_schema` or `mcp`. Calling the tool calls the function."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        description: str,
        parameters: dict[str, Any],
        read: Callable[[str], Mapping[str, Any]],
        *,
        strict: bool = True,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.description = description
        self.parameters = parameters
        """The JSON schema of the arguments: an object schema whose properties are the parameters, in
        order."""
        self.strict = strict
        """Whether `parameters` are refused if they have a keyword that the grammar cannot enforce. Otherwise
        such a keyword is not enforced, and is listed in ``unenforced`` of the turn's `get_meta_info`. In
        either case the arguments are validated when the call is read."""
        self.timeout = timeout
        if timeout is not None and not timeout > 0:
            raise InvalidRequest(f"timeout is {timeout}; it must be above 0.", field="timeout")
        if concurrency is not None and concurrency < 1:
            raise InvalidRequest(f"concurrency is {concurrency}; it must be at least 1.", field="concurrency")
        self.slot: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        """The context that each call enters on Ramify's background loop, which limits the number of
        concurrent calls to `concurrency`."""
        self._read = read

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        call: Callable[..., Any],
        *,
        strict: bool = False,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> Tool[..., Any]:
        """Make a tool whose arguments are described by a JSON Schema, such as a tool of another library.

        The arguments of a call are validated against `parameters`. Defaults in `parameters` are not filled
        in.

        Args:
            parameters: A JSON Schema of type object, of draft 2020-12 or older.
            call: A function, plain or ``async``. It is called with the arguments as keyword arguments, whose
                values are JSON values. A function that serves any schema can take ``**arguments``.
            strict: True refuses `parameters` with keywords that the grammar cannot enforce. With False (the
                default) such keywords are not enforced, and are listed in ``unenforced`` of the turn's
                `get_meta_info`.
            timeout, concurrency: The same as for `tool`.

        Raises `InvalidConstraint`, with a JSON pointer to the error, if `parameters` is no valid schema.
        Raises `InvalidRequest` for other invalid arguments.
        """
        check_name(name)
        if not callable(call):
            raise InvalidRequest(f"{call!r} is no function, so {name} cannot call it.", field="call")
        read = _reader_of(name, parameters)
        found: Tool[..., Any] = Tool(
            call,
            name,
            description,
            dict(parameters),
            read,
            strict=strict,
            timeout=timeout,
            concurrency=concurrency,
        )
        return found

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    @property
    def described(self) -> DescribedTool:
        """The description of the tool in the form that chat templates and grammars take."""
        parameters = json.dumps(self.parameters, ensure_ascii=False, separators=(",", ":"))
        return DescribedTool(
            name=self.name, description=self.description, parameters=parameters, strict=self.strict
        )

    def read(self, arguments: str) -> dict[str, Any]:
        """Parse `arguments`, a JSON text, to keyword arguments of their declared types. Raises ValueError for
        invalid arguments."""
        return dict(self._read(arguments))

    async def run(self, arguments: Mapping[str, Any], caller: asyncio.AbstractEventLoop | None) -> Any:
        """Run the function and return its result. A coroutine function runs on the event loop `caller`, or on
        this one if `caller` is None. A plain function runs in a thread; if the function returns an awaitable,
        the awaitable is awaited.

        Raises the function's exceptions, and `RequestTimeout` after `timeout` seconds. After a timeout, a
        plain function still runs to its end in its thread, and its result is dropped.
        """
        call: Callable[[], Any] = functools.partial(cast("Any", self.function), **arguments)
        try:
            async with asyncio.timeout(self.timeout) as limit:
                plain = not inspect.iscoroutinefunction(self.function)
                result = await _in_thread(call) if plain else call()
                if not inspect.isawaitable(result):
                    return result
                if caller is None or caller is asyncio.get_running_loop():
                    return await result
                return await on_loop(result, caller)
        except TimeoutError:
            if not limit.expired():
                raise  # the TimeoutError was the function's own
            raise RequestTimeout(f"{self.name} took longer than {self.timeout:g} s.") from None


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made, with the call's result. A `ToolCall` without a result is a scripted answer
    for a `ScriptedBackend`."""

    name: str
    arguments: dict[str, Any]
    """The arguments, converted to their declared types; empty if the arguments were invalid."""
    result: Any = None
    """The return value of the function; None if the call failed."""
    error: Exception | None = None
    shown: str = ""
    """The text that the model was shown: the result or the error."""


class ToolCalls(list[ToolCall]):
    """The calls of one turn, in order; empty if the model answered in words."""

    def __init__(self, calls: list[ToolCall], text: str = "") -> None:
        super().__init__(calls)
        self.text = text
        """The model's words in the turn, without the calls."""


class ToolTurn(Sequence[ToolCall]):
    """The result of `call_tools`: a sequence of the turn's calls. Reading or awaiting the sequence waits for
    the end of the turn."""

    def __init__(self, done: Event, read: Callable[[], ToolCalls]) -> None:
        self._done, self._read = done, read

    def __await__(self) -> Generator[Any, None, ToolCalls]:
        yield from self._done.wait().__await__()
        return self._read()

    @overload
    def __getitem__(self, key: int) -> ToolCall: ...
    @overload
    def __getitem__(self, key: slice) -> list[ToolCall]: ...
    def __getitem__(self, key: int | slice) -> ToolCall | list[ToolCall]:
        return self._read()[key]

    def __len__(self) -> int:
        return len(self._read())

    @property
    def text(self) -> str:
        """The model's words in the turn, without the calls."""
        return self._read().text


def make_tool(
    function: Callable[P, R], *, name: str | None = None, description: str | None = None, **options: Any
) -> Tool[P, R]:
    """Make `function` a tool. The annotations of `function` may use local names of the nearest caller outside
    this package."""
    if not callable(function):
        raise InvalidRequest(f"{function!r} is no function, so it cannot be a tool.", field="tools")
    name = name or function.__name__
    check_name(name)
    summary, arguments = read_docstring(inspect.getdoc(function) or "")
    adapter = _adapter_of(name, function, arguments, caller_names())
    description = summary if description is None else description
    try:
        parameters = _schema_of(adapter)
    except InvalidConstraint as error:
        error.field, error.message = name, f"The parameters of {name} cannot be generated. {error.message}"
        raise
    return Tool(function, name, description, parameters, adapter.validate_json, **options)


def check_name(name: object) -> None:
    """Raise `InvalidRequest` unless `name` can be the name of a tool."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be the name of a tool: letters, digits, _ and - only.", field="name"
        )


def as_tools(tools: object) -> tuple[Tool[..., Any], ...]:
    """The items of `tools` as tools: `make_tool` is applied to functions. Raises `InvalidRequest` unless
    `tools` is a list of tools and functions with different names."""
    if not isinstance(tools, list | tuple) or not tools:
        raise InvalidRequest("tools must be a list of functions, and not empty.", field="tools")
    found = tuple(one if isinstance(one, Tool) else make_tool(one) for one in tools)
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"Two tools are named {name!r}.", field="tools")
    return found


def descriptions_of(tools: Iterable[Tool[..., Any]]) -> tuple[ToolDescription, ...]:
    """The descriptions of the tools in the form of a graph's nodes."""
    return tuple(
        ToolDescription(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        )
        for tool in tools
    )


def shown(result: Any) -> str:
    """The text that the model is shown for `result`: a string as it is, any other value as JSON. Raises
    ValueError for a value that cannot be written as JSON."""
    if isinstance(result, str):
        return result
    import pydantic_core

    return pydantic_core.to_json(result).decode()


# --- schemas ------------------------------------------------------------------------------------

_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r":(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description of a function, and the descriptions of its parameters by name, read from a docstring in
    Google's or Sphinx's style."""
    summary: list[str] = []
    arguments: dict[str, list[str]] = {}
    section, current = "", None
    indent: int | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if heading := _SECTION.match(line):
            section, current, indent = heading.group(1), None, None
        elif entry := _FIELD.match(stripped):
            section, current = "Fields", arguments.setdefault(entry.group(1), [])
            current.append(entry.group(2))
        elif stripped.startswith(":"):
            section, current = "Other", None
        elif not section:
            summary.append(stripped)
        elif section in ("Args", "Arguments", "Parameters") and stripped:
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if depth <= indent and (entry := _ENTRY.match(stripped)):
                current = arguments.setdefault(entry.group(1), [])
                current.append(entry.group(2))
            elif current is not None:
                current.append(stripped)
        elif section == "Fields" and current is not None and stripped:
            current.append(stripped)
    paragraphs = "\n".join(summary).strip()
    return paragraphs, {name: " ".join(lines).strip() for name, lines in arguments.items()}


def _adapter_of(
    name: str, function: Callable[..., Any], descriptions: Mapping[str, str], names: Mapping[str, Any]
) -> Any:
    """A pydantic adapter for the function's keyword arguments as one object. `names` are local names that the
    annotations may use."""
    import pydantic
    import typing_extensions

    try:
        signature = inspect.signature(
            function, eval_str=True, globals=getattr(function, "__globals__", {}), locals=names
        )
    except NameError as error:
        raise InvalidRequest(
            f"The annotations of {name} cannot be read: {error}.",
            field=name,
            remedy="Write @tool at its definition, where those names are known.",
        ) from None
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidRequest(
                f"{name} has the parameter {parameter}, which cannot be given by name.", field=parameter.name
            )
        if parameter.annotation is parameter.empty:
            raise InvalidRequest(
                f"The parameter {parameter.name} of {name} has no type.",
                field=parameter.name,
                remedy=f"Write {parameter.name}: str, for example.",
            )
        kind = modern(parameter.annotation)
        if parameter.name in descriptions:
            kind = Annotated[kind, pydantic.Field(description=descriptions[parameter.name])]
        required = parameter.default is parameter.empty
        fields[parameter.name] = Required[kind] if required else NotRequired[kind]
    make: Any = typing_extensions.TypedDict
    arguments = make(name, fields)
    arguments.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")
    try:
        adapter = pydantic.TypeAdapter(arguments)
        adapter.json_schema()
    except pydantic.errors.PydanticUserError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidRequest(
            f"The parameters of {name} have no JSON schema: {reason}.", field=name
        ) from error
    return adapter


def _schema_of(adapter: Any) -> dict[str, Any]:
    from ramify.lang.typed.type_schema import TypeSchema

    class Untitled(TypeSchema):
        """A generator of schemas without titles, which would only repeat the names of the parameters, and
        cost tokens."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    schema: dict[str, Any] = adapter.json_schema(schema_generator=Untitled)
    schema.pop("title", None)
    return schema


def _reader_of(name: str, schema: Any) -> Callable[[str], dict[str, Any]]:
    """Make a function that parses the JSON text of arguments, and validates them against `schema`. The
    function raises ValueError for invalid arguments. Raises `InvalidRequest` or `InvalidConstraint` for an
    invalid `schema`."""
    from ramify.grammar.schema.instance import validate, validate_text

    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise InvalidRequest(
            f"The parameters of {name} are no JSON Schema of an object: {schema!r:.80}",
            field="parameters",
            remedy='Write {"type": "object", "properties": {…}}.',
        )
    validate(dict(schema), {})  # raises if the schema is invalid

    def read(text: str) -> dict[str, Any]:
        if failures := validate_text(dict(schema), text):
            raise ValueError(" ".join(map(str, failures)))
        arguments: dict[str, Any] = read_json(text)
        return arguments

    return read


# --- running ------------------------------------------------------------------------------------


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a new thread. A thread pool could deadlock, if tools that fill the pool wait for tools
    that need the pool."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on the caller cannot cancel it
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if plain else RuntimeError(repr(error)))

    threading.Thread(target=work, name="ramify-tool", daemon=True).start()
    return await asyncio.wrap_future(future)


async def on_loop(work: Awaitable[Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Await `work` on the event loop `loop`, and return its result."""

    async def run() -> Any:
        return await work

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))
