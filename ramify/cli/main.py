"""The command line. Each command's module is imported only when it is run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from ramify.cli import settings, signals
from ramify.credentials import command_line
from ramify.errors import RamifyError
from ramify.lang.batch.output import FULL
from ramify.spelling import nearest

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI's, Anthropic's, Ollama's and SGLang's API)",
    "deploy": "serve a model on a Ray cluster, with replicas on several machines",
    "run": "run a program from a file and print its outputs and its tree of calls",
    "chat": "chat with a model in the terminal",
    "pull": "fetch a model and print its path",
    "inspect": "say what a model is, what it needs, and what of it fits this machine",
    "quantize": "write a model with quantised weights",
    "calibrate": "measure decisions on labelled questions, and fit temperatures to them",
    "cache": "list what is kept on disk, and remove it",
    "top": "watch a running server: requests, tokens/s, KV pages, held prefixes, models, keys",
    "keys": "make a key for the file of API keys",
    "bench": "load-test an OpenAI-compatible endpoint",
}

FAILED = 2
"""Exit status after a `RamifyError`, and after wrong arguments (argparse)."""
OWN_SIGNALS = ("serve", "chat")
"""Commands that handle Ctrl-C themselves: the server drains, and in a chat it stops one answer."""
BROKEN_PIPE = 141
"""Exit status if the reader of standard output is gone: 128 + SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model's or user's text need not be Unicode
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output is gone, as with ``| head``
        _write_no_more()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _write_no_more()
        print(f"ramify: standard output cannot be written: {error.strerror}.", file=sys.stderr)
        return FAILED


def _write_no_more() -> None:
    """Redirect standard output to the null device, so that writing its buffer at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser, command = _parsers(chosen)
    if not arguments:
        parser.print_help()
        return FAILED
    if chosen is None:
        parser.parse_args(arguments)  # --version, --help, or an error
        parser.error("the command comes first")
    options = command.parsed(arguments[1:])
    options.command_line = command_line(["ramify", *arguments], vars(options))
    handled = contextlib.nullcontext() if chosen in OWN_SIGNALS else signals.stopped_by_signals()
    status: int
    try:
        with handled:
            if hasattr(options, "configs"):
                settings.fill(options, chosen)
                if options.print_config:
                    settings.print_config(options)
                    return 0
            status = importlib.import_module(f"ramify.cli.{chosen}").run_command(options)
    except RamifyError as error:
        place = settings.place_of(error, options)
        print(f"ramify: {error}{place}", *_notes(error), sep="\n", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        if not _imported_by_us(error):
            raise
        print(
            f"ramify: {error}, which this version needs: the installation is incomplete, or older than its "
            "sources. Install it again: `make demo` or `pip install --editable .` in a clone, else "
            "`pip install ramify-llm`.",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        if notes := _notes(error):
            said = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            print(f"ramify: {said}.", *notes, sep="\n", file=sys.stderr)
        status = 128 + int(number)  # as in shells
        if argv is None:  # the exit of this process would wait for threads, such as those of `ramify pull`
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(status)
    return status


def _imported_by_us(error: ModuleNotFoundError) -> bool:
    """Whether the import that failed stands in this package, and not in a user's program."""
    names: list[str] = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    importer = [name for name in names if not name.startswith("importlib")][-1]
    return importer.partition(".")[0] == "ramify"


def _notes(error: BaseException | None) -> list[str]:
    """The notes of an error and of the errors that caused it, in order from the first cause to `error`."""
    notes: list[str] = []
    seen: set[int] = set()  # an error that is raised again by its own consequence is its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        notes[:0] = getattr(error, "__notes__", ())
        error = error.__cause__ or error.__context__
    return notes


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line, with the most similar flag or value, and without the
    usage text that argparse prints before it."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(FAILED, f"{self.prog}: {message}{end} See {self.prog} --help.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's check of a value against the choices of `action`; the subcommands are choices too."""
        if action.choices is None or value in action.choices:
            return
        from ramify.runtime.config import VALUES_ELSEWHERE

        known = list(action.choices)
        remedy = nearest(str(value), known, VALUES_ELSEWHERE) or ""
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}. {remedy or 'There are ' + ', '.join(known)}")
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}. {remedy}".rstrip())

    def parsed(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of `arguments`, flags and others in any order.

        Exits with an error about the first unknown argument, with a suggestion if a known flag is similar.
        """
        options, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            self._refuse(next((one for one in unknown if one.startswith("-")), unknown[0]))
        return options

    def _refuse(self, argument: str) -> NoReturn:
        from ramify.runtime.config import ELSEWHERE

        first = argument.partition("=")[0] if argument.startswith("-") else argument
        flags = [flag for action in self._actions for flag in action.option_strings]
        elsewhere = {
            f"--{name.replace('_', '-')}": here if " " in here else f"--{here.replace('_', '-')}"
            for name, here in ELSEWHERE.items()
        }
        remedy = nearest(first, flags, elsewhere) if first.startswith("-") else None
        self.error(f"unknown argument {first}. {remedy or ''}".rstrip())


def _parsers(chosen: str | None) -> tuple[_Parser, _Parser]:
    """The main parser, and the parser of the command `chosen`.

    Only that command is imported, and gets its arguments. Without a command, both are the main parser.
    """
    parser = _Parser(
        prog="ramify",
        description="Programs that make many calls to a language model, and their runtime.",
        epilog="`ramify help COMMAND` or `ramify COMMAND --help` explains a command and its flags.",
    )
    parser.add_argument("--version", action=_Version)
    found = parser
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            importlib.import_module(f"ramify.cli.{name}").add_arguments(command)
            if command.get_default("configs"):
                settings.add_settings_flags(command)
            places = [one for one in command._actions if not one.option_strings]
            words = [f"[{one.dest}]" if one.nargs == "?" else one.metavar or one.dest for one in places]
            command.usage = command.usage or " ".join([f"ramify {name} [flags]", *map(str, words)])
            found = command
    return parser, found


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of the command `name`."""
    return _parsers(name)[1]


class _Version(argparse.Action):
    """An action that looks the version up only if ``--version`` is given."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        import ramify

        print(f"ramify {ramify.__version__}")
        parser.exit()
