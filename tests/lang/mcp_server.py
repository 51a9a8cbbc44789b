"""MCP servers for tests: ``python mcp_server.py [PORT]``, over stdio without a port, or ``… paged``."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TypedDict

from mcp import stdio_server, types
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("tests")


class Weather(TypedDict):
    city: str
    degrees: int


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool(name="weather.today")
def weather(city: str) -> Weather:
    """Tell the weather."""
    return {"city": city, "degrees": 20}


@server.tool(structured_output=False)
def lines(number: int) -> list[str]:
    return [f"line {index}" for index in range(number)]


@server.tool(structured_output=False)
def picture() -> list[object]:
    return ["Here:", Image(data=b"12345", format="png")]


@server.tool()
def divide(a: float, b: float) -> float:
    return a / b


@server.tool()
def environment(name: str) -> str:
    return f"{os.environ.get(name)} in {os.getcwd()}"


@server.tool()
def header(name: str, context: Context) -> str:
    return str(context.request_context.request.headers.get(name))


@server.tool()
async def sleep() -> None:
    await asyncio.Event().wait()


@server.tool()
def die() -> None:
    print("I cannot go on.", file=sys.stderr, flush=True)
    os._exit(3)


async def list_page(context: object, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    """A list of three pages with a tool each; the schema of the second is invalid."""
    page = int(params.cursor) if params is not None and params.cursor else 0
    schema: dict[str, object] = {"type": "object", "required": "a"} if page == 1 else {"type": "object"}
    tool = types.Tool(name=f"tool {page}", input_schema=schema)
    return types.ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page < 2 else None)


async def call_page(context: object, params: types.CallToolRequestParams) -> types.CallToolResult:
    link = types.ResourceLink(type="resource_link", name="notes", uri="file:///notes", mime_type="text/plain")
    text = types.TextResourceContents(uri="file:///a", text="A text.")
    blob = types.BlobResourceContents(uri="file:///b", blob="MTIzNDU2", mime_type="application/zip")
    resources = [types.EmbeddedResource(type="resource", resource=one) for one in (text, blob)]
    return types.CallToolResult(content=[link, *resources], structured_content={"a": 1})


async def run_paged() -> None:
    paged = Server("paged", on_list_tools=list_page, on_call_tool=call_page)
    async with stdio_server() as (reading, writing):
        await paged.run(reading, writing, paged.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1:] == ["paged"]:
        asyncio.run(run_paged())
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
