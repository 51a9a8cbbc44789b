"""Tools of MCP servers (Model Context Protocol), over stdio and streamable HTTP, with the `mcp` package."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ramify.errors import BackendError, InvalidConstraint, InvalidRequest, RamifyError
from ramify.lang.tools.tool import Tool, on_loop
from ramify.loop import background_loop, submit, wait
from ramify.spelling import suggests

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

logger = logging.getLogger(__name__)

LAST_WORDS = 5
"""Most lines of a server's standard error that are quoted when the server has ended unexpectedly."""

OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
}
OPEN |= {"allOf", "anyOf", "oneOf", "if", "not", "$ref", "$dynamicRef", "dependentSchemas", "dependencies"}
"""Keywords with which a schema itself decides about properties that ``properties`` does not name."""


class ToolError(RamifyError):
    """An error that a tool of an MCP server reports. The model is shown the error."""

    code = "tool_error"


@suggests
def mcp(
    server: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    prefix: str = "",
    timeout: float | None = 60.0,
    startup_timeout: float = 60.0,
    concurrency: int | None = None,
) -> McpServer:
    """An MCP server, whose tools are available in a ``with`` or ``async with`` block:
    ``with mcp("command …") as tools:``.

    Args:
        server: The command that starts the server, as one string or as a list of arguments; or the URL of a
            running server, which begins with ``http://`` or ``https://``.
        env: Environment variables of the command. In addition, the command inherits HOME, LOGNAME, PATH,
            SHELL, TERM and USER.
        cwd: The command's working directory.
        headers: HTTP headers of every request to a URL.
        prefix: A prefix for the names of the tools, so that the tools of two servers have different names.
        timeout: Seconds after which a call of a tool fails; None for no limit.
        startup_timeout: Seconds within which the server must be connected and have listed its tools.
        concurrency: Most calls of each tool that run at once.

    Raises `InvalidRequest` for an option that does not apply to a command or to a URL, and if the `mcp`
    package is missing. Entering the block raises `BackendError` if the server does not start or does not
    answer.
    """
    url = isinstance(server, str) and server.startswith(("http://", "https://"))
    for name, value, fits in (("env", env, not url), ("cwd", cwd, not url), ("headers", headers, url)):
        if value is not None and not fits:
            where = "a command" if url else "a URL"
            raise InvalidRequest(f"{name} is for {where}, and the MCP server is {server!r}.", field=name)
    command = [] if url else shlex.split(server) if isinstance(server, str) else list(map(str, server))
    if not url and not command:
        raise InvalidRequest("An MCP server needs a command or a URL.", field="server")
    try:
        from mcp import Client, StdioServerParameters  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(
            f"Tools of MCP servers need the package mcp 2: {error}.",
            field="server",
            remedy="pip install 'ramify-llm[mcp]'",
        ) from None
    connection = _Http(str(server), dict(headers or {})) if url else _Command(command, dict(env or {}), cwd)
    return McpServer(connection, prefix, timeout, startup_timeout, concurrency)


class McpServer:
    """An MCP server, whose tools can be used in a ``with`` or ``async with`` block; made by `mcp`.

    The block's variable is the list of tools that the server has when the block begins. Calls always run on
    Ramify's background loop, also if the program has an event loop of its own.
    """

    def __init__(
        self,
        connection: _Http | _Command,
        prefix: str,
        timeout: float | None,
        startup_timeout: float,
        concurrency: int | None,
    ) -> None:
        self.name = connection.name
        self.tools: list[Tool[..., Any]] = []
        self._connection = connection
        self._prefix = prefix
        self._startup_timeout = startup_timeout
        self._limits: dict[str, Any] = {"timeout": timeout, "concurrency": concurrency}
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> list[Tool[..., Any]]:
        return wait(self._open())

    def __exit__(self, *error: object) -> None:
        wait(self._close())

    async def __aenter__(self) -> list[Tool[..., Any]]:
        return await asyncio.wrap_future(submit(self._open()))

    async def __aexit__(self, *error: object) -> None:
        await asyncio.wrap_future(submit(self._close()))

    # --- on the background loop ---

    async def _open(self) -> list[Tool[..., Any]]:
        if self._task is not None:
            raise InvalidRequest(f"The block of the MCP server {self.name} has been entered before.")
        ready, self._closing = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._serve(ready))
        opened = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait(
                (opened, self._task), timeout=self._startup_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            opened.cancel()
            if not ready.is_set():
                self._task.cancel()
        if not ready.is_set():
            (error,) = await asyncio.gather(self._task, return_exceptions=True)
            if isinstance(error, asyncio.CancelledError):
                error = TimeoutError(f"it did not answer within {self._startup_timeout:g} s")
            words = await self._connection.last_words()
            raise BackendError(
                f"The MCP server {self.name} did not start: {_reason(error)}.{words}"
            ) from error
        return self.tools

    async def _close(self) -> None:
        self._closing.set()
        assert self._task is not None
        await asyncio.gather(self._task, return_exceptions=True)

    async def _serve(self, ready: asyncio.Event) -> None:
        """Open the connection, and keep it open until the block ends. A connection must be opened and closed
        by the same task."""
        from mcp import Client

        try:
            async with Client(self._connection.streams()) as self._client:
                self.tools[:] = await self._list(self._client)
                ready.set()
                await self._closing.wait()
        finally:
            self._client = None

    async def _list(self, client: Client) -> list[Tool[..., Any]]:
        """The tools of the server, from all pages of the server's list. Tools with an invalid schema are left
        out."""
        found: list[Tool[..., Any]] = []
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor, cache_mode="bypass")
            for tool in page.tools:
                try:
                    found.append(self._tool(tool.name, tool.description or "", tool.input_schema))
                except InvalidConstraint as error:
                    logger.warning(
                        "The tool %s of the MCP server %s is left out: its schema is invalid. %s",
                        *(tool.name, self.name, error),
                    )
            cursor = page.next_cursor
            if not cursor:
                return found

    def _tool(self, name: str, description: str, parameters: dict[str, Any]) -> Tool[..., Any]:
        async def call(**arguments: Any) -> Any:
            return await on_loop(self._call(name, arguments), background_loop())

        shown = re.sub(r"[^A-Za-z0-9_-]", "_", self._prefix + name)[:64]
        return Tool.from_schema(shown, description, _closed(parameters), call, **self._limits)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._client is None:
            raise BackendError(f"The MCP server {self.name} is closed, so {tool} cannot be called.")
        try:
            return _result(await self._client.call_tool(tool, arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                words = await self._connection.last_words()
                raise BackendError(
                    f"The MCP server {self.name} has ended, so {tool} cannot be called.{words}"
                ) from error
            raise BackendError(f"The MCP server {self.name} did not run {tool}: {error.message}") from error


class _Http:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.name = url
        self._headers = headers

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(30.0, read=None)  # the tools' own timeout ends a call
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=limits) as client,
            streamable_http_client(self.name, http_client=client) as streams,
        ):
            yield streams

    async def last_words(self) -> str:
        return ""


class _Command:
    """A server that runs as a subprocess. Its standard error is logged."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | os.PathLike[str] | None) -> None:
        self.name = shlex.join(command)
        self._command, self._env = command, env
        self._cwd = None if cwd is None else os.fspath(cwd)
        self._lines: deque[str] = deque(maxlen=LAST_WORDS)
        self._reader: threading.Thread | None = None

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters, stdio_client

        command, *arguments = self._command
        given = StdioServerParameters(command=command, args=arguments, env=self._env, cwd=self._cwd)
        read, write = os.pipe()
        with os.fdopen(write, "w") as errors:
            self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
            self._reader.start()
            async with stdio_client(given, errors) as streams:
                errors.close()
                yield streams

    def _read(self, pipe: int) -> None:
        with open(pipe, errors="replace") as lines:
            for line in lines:
                logger.info("%s: %s", self.name, line.rstrip())
                self._lines.append(line.strip())

    async def last_words(self) -> str:
        """A sentence that quotes the last lines of the server's standard error; empty if there are none."""
        if self._reader is not None:
            await asyncio.to_thread(self._reader.join, 1.0)
        return f" It wrote: {' | '.join(self._lines)}" if self._lines else ""


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return schema if OPEN & schema.keys() else {**schema, "additionalProperties": False}


def _reason(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error) or type(error).__name__).rstrip(".")


def _result(result: CallToolResult) -> Any:
    """The result of a call: the structured content, if there is any and all other content is text; otherwise
    the text, with descriptions in place of images and files. Raises `ToolError` if the tool reports an
    error."""
    texts = [_text(block) for block in result.content]
    if result.is_error:
        raise ToolError("\n".join(texts) or "The tool failed.")
    if result.structured_content is not None and all(block.type == "text" for block in result.content):
        return result.structured_content
    return "\n".join(texts)


def _text(block: Any) -> str:
    """The text that the model is shown for a block of content. An image or file is described by its name,
    URI, type and size."""
    resource = getattr(block, "resource", block)
    if (text := getattr(resource, "text", None)) is not None:
        return str(text)
    data = getattr(resource, "data", None) or getattr(resource, "blob", None) or ""
    facts = [
        getattr(resource, "name", None),
        getattr(resource, "uri", None),
        getattr(resource, "mime_type", None),
    ]
    shown = [str(fact) for fact in facts if fact] + (
        [f"{len(data.rstrip('=')) * 3 // 4} bytes"] if data else []
    )
    return f"[{block.type.replace('_', ' ')}: {', '.join(shown)}]"
