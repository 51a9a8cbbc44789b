"""`ramify chat`: a conversation in the terminal, with the local engine or a server.

Each turn is a run of the program `turn`, which begins with the tokens of the turns before. So they are in the
cache, and a turn that fails leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

import ramify as rm
from ramify.cli.flags import add_model
from ramify.cli.inputs.program_file import load_module
from ramify.cli.target import add_target_flags, engine_of, first_model
from ramify.credentials import endpoint_key
from ramify.errors import BackendError, InvalidRequest, NotFound, RamifyError
from ramify.lang.backends.base import Backend
from ramify.lang.calls.tool_turns import form_of
from ramify.lang.prompt.chat import Content
from ramify.lang.tools.forms import TaggedCalls
from ramify.lang.tools.tool import Tool, as_tools
from ramify.loop import wait
from ramify.sampling_params import SamplingParams
from ramify.spelling import nearest
from ramify.text import shortened
from ramify.tool_calls.parser import CallParser
from ramify.tool_calls.parser import Content as Words

MAX_ROUNDS = 8
"""Maximum number of times that the model may call tools in one turn."""

HELP = """\
/system TEXT     a new conversation with this system prompt
/schema FILE     answers fit the JSON schema in FILE; /schema off ends that
/tools FILE.py   a new conversation with the functions of FILE.py as tools; /tools off
/thoughts        the thoughts before the last answer
/reset           a new conversation
/save FILE       write the conversation as JSON
/quit            end; so does Ctrl-D
Ctrl-C stops an answer. A line that ends with \\ goes on in the next; \"\"\" begins and ends several lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="The system prompt.")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="Most tokens of an answer, cut to what the model or the server allows. (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="X",
        help="Sampling temperature. (default: %(default)s)",
    )
    parser.add_argument(
        "--one-message",
        action="store_true",
        help="Take all of standard input as one message, instead of each line as one.",
    )
    add_target_flags(parser)


def run_command(options: argparse.Namespace) -> int:
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature).check()
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    messages = _one_message() if options.one_message else _lines(typed)
    engine = engine_of(options)
    if engine is None:
        server = _connect(options.endpoint, endpoint_key(options.endpoint_key), options.endpoint_model)
        Chat(server, sampling, options.system, typed=typed).converse(messages)
        return 0
    with engine:
        Chat(engine, sampling, options.system, typed=typed).converse(messages)
    return 0


def _connect(url: str, api_key: str | None, name: str | None) -> Backend:
    """A backend for the model `name` of a server, by default the one that it lists first. The server may be
    any with OpenAI's API."""
    origin = url.rstrip("/").removesuffix("/v1")
    endpoint = rm.RuntimeEndpoint(origin, api_key=api_key, model=name or "")
    try:
        wait(endpoint.info())
    except (NotFound, BackendError):
        model = name or wait(first_model(origin + "/v1", api_key))
        return rm.OpenAI(model, base_url=origin + "/v1", api_key=api_key)
    return endpoint


def _one_message() -> Iterator[str]:
    """All of standard input. It is no command: a slash at its beginning is doubled, and stands for itself."""
    text = sys.stdin.read()
    yield f"/{text}" if text.startswith("/") else text


def _lines(typed: bool) -> Iterator[str]:
    """The messages and commands that are typed or piped. In a pipe nothing is shown before them."""
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing and history
    while True:
        try:
            text = input("> " if typed else "")
            text = _whole_message(text, "... " if typed else "")
        except KeyboardInterrupt:
            if not typed:
                raise
            print()
            continue
        except EOFError:
            if typed:
                print()
            return
        yield text


def _whole_message(text: str, prompt: str) -> str:
    """The message that begins with the line `text`, and goes on after a backslash or up to a closing
    ``\"\"\"``."""
    with suppress(EOFError):
        if text.lstrip().startswith('"""'):
            text = text.lstrip()[3:]
            while not text.rstrip().endswith('"""'):
                text += "\n" + input(prompt)
            text = text.rstrip()[:-3]
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input(prompt)
    return text


class Chat:
    """A conversation with one model."""

    def __init__(
        self, backend: Backend, sampling: SamplingParams, system: str | None = None, *, typed: bool = False
    ) -> None:
        """`typed`: somebody sits at a terminal. Otherwise only answers are printed, and an error ends the
        conversation."""
        self.backend = backend
        self.sampling = sampling
        self.system = system
        self.content: Content | None = None
        """The turns so far; None at the beginning."""
        self.schema: Any = None
        self.tools: list[Tool[..., Any]] = []
        self.thoughts = ""
        self.said = ""
        """The text of the current answer so far."""
        self._typed = typed
        chat = wait(backend.info()).chat_format
        self.thinks = chat is not None and chat.thinking is not None

    def converse(self, messages: Iterator[str]) -> None:
        """Answer each message, and carry out each command. Raises errors unless somebody sits there."""
        if self._typed:
            self.note("/help lists the commands.")
        for text in messages:
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if not self.command(*text[1:].partition(" ")[::2]):
                        return
                elif text.strip():
                    self.answer(text.removeprefix("/") if text.startswith("//") else text)
            except rm.ProgramError as error:
                failure: Exception = error.__cause__ if isinstance(error.__cause__, RamifyError) else error
            except OSError as error:
                if error.filename is None:
                    raise
                failure = InvalidRequest(f"{error.filename}: {error.strerror}.")
            except RamifyError as error:
                failure = error
            else:
                continue
            if not self._typed:
                raise failure
            print(failure, file=sys.stderr)

    def answer(self, text: str) -> None:
        """Stream the answer to `text`, then print its figures."""
        self.said, started = "", time.perf_counter()
        try:
            state = asyncio.run(self._run(text))
        except KeyboardInterrupt:
            if not self._typed:
                raise
            self.note("\nstopped")
            if self.said:
                self.content = asyncio.run(self._run(text, answered=self.said))._branch.content
            return
        if self.said:
            print()
        if error := state.error():
            raise error
        self.content = state._branch.content
        usage, seconds = state.usage, time.perf_counter() - started
        cached = usage.cached_tokens / max(usage.prompt_tokens, 1)
        self.note(
            f"[prompt {usage.prompt_tokens}, {cached:.0%} cached; answer {usage.completion_tokens}, "
            f"{usage.completion_tokens / seconds:.1f} tokens/s]"
        )
        last = [call for call in state.trace.walk() if call.finish is not None][-1]
        if last.finish is not None and last.finish.reason == "length":
            tokens, most = last.own_usage.completion_tokens, self.sampling.max_tokens
            short = most is not None and tokens < most
            why = "the model or the server allows no more" if short else f"--max-tokens is {most}"
            print(f"The answer was cut after {tokens} tokens ({why}).", file=sys.stderr)

    async def _run(self, text: str, answered: str | None = None) -> rm.ProgramState:
        temperature = self.sampling.temperature
        state = await turn.run(
            self, text, answered, stream=True, backend=self.backend, temperature=temperature
        )
        await state.wait()
        return state

    # --- output ---

    def note(self, text: str) -> None:
        """Print a dim line, in a terminal only."""
        if self._typed:
            print(f"\x1b[2m{text}\x1b[0m", flush=True)

    def show(self, text: str) -> None:
        print(text, end="", flush=True)
        self.said += text

    # --- commands ---

    def command(self, name: str, value: str) -> bool:
        """Carry out a command; returns False at the end of the conversation."""
        value = value.strip()
        commands: dict[str, Callable[[str], object]] = {
            "system": self._set_system,
            "schema": self._set_schema,
            "tools": self._set_tools,
            "thoughts": lambda _: print(self.thoughts or "The last answer has no thoughts."),
            "reset": lambda _: self._reset(),
            "save": self._save,
            "help": lambda _: print(HELP),
        }
        if name in ("quit", "exit"):
            return False
        if name not in commands:
            raise InvalidRequest(
                f"There is no /{name[:50]}.",
                remedy=nearest(f"/{name}", [f"/{one}" for one in commands])
                or "/help lists the commands; a message that begins with / is written //.",
            )
        if not value and name in ("schema", "tools", "save"):
            raise InvalidRequest(f"/{name} needs a file.", remedy="/help shows how.")
        commands[name](value)
        return True

    def _reset(self) -> None:
        self.content, self.thoughts = None, ""
        self.note("A new conversation.")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self._reset()

    def _set_schema(self, path: str) -> None:
        if path != "off" and self.tools:
            raise InvalidRequest("A schema and tools exclude each other.", remedy="/tools off")
        self.schema = None if path == "off" else _read_schema(path)

    def _set_tools(self, path: str) -> None:
        if path != "off":
            if self.schema is not None:
                raise InvalidRequest("A schema and tools exclude each other.", remedy="/schema off")
            if not self._typed:
                raise InvalidRequest("/tools needs a terminal, where each call is confirmed.")
        self.tools = [] if path == "off" else [self._confirmed(tool) for tool in _tools_of(path)]
        self.note(", ".join(tool.name for tool in self.tools) or "no tools")
        self._reset()

    def _confirmed(self, tool: Tool[..., Any]) -> Tool[..., Any]:
        """`tool`, which asks before each call."""

        async def call(**arguments: Any) -> Any:
            given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            if not _agreed(f"\n{tool.name}({shortened(given, 500)})  run it? [y/N] "):
                raise PermissionError("The user did not allow this call.")
            result = await tool.run(arguments, None)
            self.note(shortened(f"→ {result}", 500))
            return result

        asking = copy.copy(tool)
        asking.function, asking.timeout = call, None
        return asking

    def _save(self, path: str) -> None:
        turns = () if self.content is None else self.content.dialogue.messages
        with Path(path).expanduser().open("x") as file:
            file.write(msgspec.json.format(msgspec.json.encode(turns)).decode() + "\n")
        self.note(f"{len(turns)} turns are in {path}.")


@rm.function
async def turn(s: rm.ProgramState, chat: Chat, text: str, answered: str | None) -> None:
    """A message and its answer, behind the turns before. `answered`: the answer, if it is known."""
    if chat.sampling.max_tokens is not None:
        s._branch.run.default_tokens = chat.sampling.max_tokens
    tools = chat.tools or None
    if chat.content is not None:
        s._branch.content, tools = chat.content, None
    elif chat.system:
        s += rm.system(chat.system, tools=tools)
        tools = None
    s += rm.user(text, tools=tools)
    if answered is not None:
        s += rm.assistant(answered)
    elif chat.tools:
        await _call_tools(s, chat)
    else:
        s += rm.assistant(rm.gen("answer", schema=chat.schema, thinking=True if chat.thinks else None))
        if chat.thinks:
            await _fold_thoughts(s, chat)
        async for piece in s.text_async_iter("answer"):
            chat.show(piece)


async def _fold_thoughts(s: rm.ProgramState, chat: Chat) -> None:
    chat.thoughts, tokens = "", 0
    async for piece, meta in s.text_async_iter("answer", True, thinking=True):
        chat.thoughts += piece
        tokens = meta["completion_tokens"]
    if chat.thoughts:
        chat.note(f"[thought for {tokens} tokens; /thoughts shows them]")


async def _call_tools(s: rm.ProgramState, chat: Chat) -> None:
    """Let the model call tools until it answers in words."""
    form = form_of(s._branch.run.home)
    for number in range(MAX_ROUNDS):
        name = f"answer {number}"
        s.call_tools(chat.tools, name, required=False)
        if isinstance(form, TaggedCalls):
            parser = CallParser(form.form)
            async for piece in s.text_async_iter(name):
                for part in parser.push(piece):
                    chat.show(part.text if isinstance(part, Words) else "")
            for part in parser.close():
                chat.show(part.text if isinstance(part, Words) else "")
        calls = await s.aget(name)
        if not isinstance(form, TaggedCalls):
            chat.show(calls.text)
        if not calls:
            return
    chat.note(f"\nThe model has called tools {MAX_ROUNDS} times, and may not any more in this turn.")


def _agreed(question: str) -> bool:
    """Ask the user. Ctrl-C means no: asyncio's handler of it would not end the wait for a line."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(question).strip().lower() in ("y", "yes")
    except (KeyboardInterrupt, EOFError):
        return False
    finally:
        signal.signal(signal.SIGINT, handler)


def _read_schema(path: str) -> Any:
    try:
        schema = json.loads(Path(path).expanduser().read_text())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} has no JSON schema, which is an object.")
    return schema


def _tools_of(path: str) -> tuple[Tool[..., Any], ...]:
    """The tools of a module; if it has none, its public functions. Raises `InvalidRequest` for any error in
    it."""
    try:
        return _offered_by(load_module(str(Path(path).expanduser())), path)
    except (RamifyError, OSError):
        raise
    except Exception as error:
        raise InvalidRequest(f"{path}: {type(error).__name__}: {error}.") from error


def _offered_by(module: ModuleType, path: str) -> tuple[Tool[..., Any], ...]:
    own = [value for name, value in vars(module).items() if not name.startswith("_")]
    tools = [value for value in own if isinstance(value, Tool)] or [
        value
        for value in own
        if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__")
    ]
    if not tools:
        raise InvalidRequest(f"{path} has no functions.")
    return as_tools(tools)
