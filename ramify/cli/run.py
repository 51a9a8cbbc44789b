"""`ramify run program.py:fn key=value …`, once or, with --input, for each row of a file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ramify.cli.inputs.program_file import load, read_arguments
from ramify.cli.inputs.run_rows import InputRows
from ramify.cli.signals import run_async, told_on_interrupt
from ramify.cli.target import add_target_flags, target
from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.batch.breaker import GIVE_UP_AFTER_S
from ramify.lang.batch.output import STANDARD_OUTPUT, check_file, check_out, descriptor, is_stream
from ramify.lang.batch.summary import BatchSummary, cost
from ramify.lang.trace.spans import enable_otel
from ramify.priority import BATCH, MOST
from ramify.retry import RETRY_FOR_S


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "ramify run [flags] file.py:function key=value …\n"
        "       ramify run [flags] file.py:function --input FILE --output FILE [key=value …]"
    )
    parser.add_argument(
        "program",
        metavar="file.py:function",
        help="A file, and a function in it below @ramify.function. A file with one program needs no name.",
    )
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="key=value",
        default=[],
        help="An argument of the program. A value is read as JSON, unless the parameter is a str or the "
        "value is no JSON.",
    )
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help=f"Priority of the requests, -{MOST} to {MOST}; higher goes first. "
        f"(default: 0, with --input {BATCH})",
    )
    parser.add_argument(
        "--otel",
        action="store_true",
        help="Send spans of OpenTelemetry for the program and its requests, as the variables OTEL_* say.",
    )
    rows = parser.add_argument_group("run the program for each row of a file")
    rows.add_argument(
        "--input",
        metavar="FILE",
        help="Rows of arguments: a .csv, .jsonl or .parquet file. -: standard input.",
    )
    rows.add_argument(
        "--output",
        metavar="FILE",
        help="The results, one JSON line a row. A row that is in the file is not run again. FILE.parquet: "
        "also a table, made from FILE.jsonl. -: standard output.",
    )
    rows.add_argument("--limit", type=int, metavar="N", help="Run only the first N rows.")
    rows.add_argument("--sample", type=int, metavar="N", help="Run only N rows, drawn at random.")
    rows.add_argument(
        "--sample-seed",
        type=int,
        metavar="N",
        help="Draw the sample with another seed; one seed gives the same rows each time. (default: 0)",
    )
    rows.add_argument(
        "--dry-run",
        action="store_true",
        help="Run at most 8 rows, write nothing, and print prompts, expected tokens, time and cost.",
    )
    rows.add_argument(
        "--price",
        metavar="IN,CACHED,OUT",
        help="Print the cost at these prices for a million prompt tokens, cached prompt tokens and output "
        "tokens.",
    )
    rows.add_argument(
        "--concurrency", type=int, metavar="N", help="Number of rows that run at a time. (default: 64)"
    )
    rows.add_argument(
        "--look-ahead",
        type=int,
        metavar="N",
        help="Number of rows read ahead, to run those with a common prefix together. "
        "(default: 16 x the concurrency)",
    )
    rows.add_argument(
        "--columns", metavar="NAME,…", help="The columns to pass to the program. (default: all)"
    )
    rows.add_argument(
        "--key", metavar="NAME", help="The column that identifies a row. It is copied into the row's line."
    )
    rows.add_argument(
        "--rerun",
        metavar="WHICH",
        help="The rows to run again besides those without a result; several words are separated by commas. "
        "failed: the rows that failed. changed: the rows with results of another version of the program. "
        "missing: none, results of another version are kept.",
    )
    rows.add_argument(
        "--trace", metavar="FILE.html", help="Write a report of the calls of the first rows that end."
    )
    rows.add_argument(
        "--trace-rows", type=int, metavar="N", help="Number of rows in that report. (default: 16)"
    )
    rows.add_argument(
        "--give-up-after",
        type=float,
        metavar="S",
        help="Stop after this many seconds without an answer from the model. (default: 300)",
    )
    rows.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Show a progress bar. (default: in a terminal)",
    )
    add_target_flags(parser)


ROW_FLAGS = (
    *("output", "concurrency", "look_ahead", "columns", "key", "rerun", "give_up_after"),
    *("trace", "trace_rows", "limit", "sample", "sample_seed", "dry_run", "price"),
)


def run_command(options: argparse.Namespace) -> int:
    if options.otel:
        enable_otel()
    if options.input is None:
        return _on_target(_once(options), options)
    work, again = _rows(options)
    if options.output is None or is_stream(options.output):
        return _on_target(work, options)
    with told_on_interrupt(lambda: f"To go on: {again}"):
        return _on_target(work, options)


def _on_target(work: Callable[[Any], int], options: argparse.Namespace) -> int:
    retry_for = (
        RETRY_FOR_S if options.give_up_after is None else min(max(options.give_up_after, 0), RETRY_FOR_S)
    )
    with target(options, retry_for=retry_for) as backend:
        return work(backend)


def _once(options: argparse.Namespace) -> Callable[[Any], int]:
    for name in ROW_FLAGS:
        if getattr(options, name) not in (None, False):
            raise InvalidRequest(f"--{name.replace('_', '-')} needs --input.", field=name)
    program = load(options.program)
    arguments = read_arguments(program, options.arguments)
    return functools.partial(_run_once, program.with_options(priority=options.priority), arguments)


def _rows(options: argparse.Namespace) -> tuple[Callable[[Any], int], str]:
    """A function that runs the rows on a backend, and the command line that continues the batch after an
    interruption."""
    if options.output is None and not options.dry_run:
        raise InvalidRequest("--input needs --output.", field="output")
    if options.output is not None:
        check_out(options.output)  # before an engine starts
    if options.trace is not None:
        check_file(options.trace, "trace")
    program = load(options.program)
    common = read_arguments(program, options.arguments, complete=False)
    rows = InputRows(
        options.input,
        program,
        list(common),
        options.key,
        options.columns,
        limit=options.limit,
        sample=options.sample,
        seed=options.sample_seed,
    )
    price = None if options.price is None else _price(options.price)
    work = functools.partial(_run_rows, program, common, rows, options, price)
    return work, rows.again or options.command_line


def _price(text: str) -> tuple[float, float, float]:
    try:
        computed, cached, output = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--price is {text!r}; it must be three numbers, IN,CACHED,OUT.", field="price"
        ) from None
    return computed, cached, output


def _run_rows(
    program: Any,
    common: dict[str, Any],
    rows: InputRows,
    options: argparse.Namespace,
    price: tuple[float, float, float] | None,
    backend: Any,
) -> int:
    """Run the rows and print the summary; returns the exit status.

    It is 1 if a row failed, in this run or an earlier one, or if the batch was stopped.
    """
    program = program.bind(**common)
    found = _run_batch(program, rows, options, backend)
    # If the rows go to standard output, messages about them go to standard error.
    said = functools.partial(
        print, file=sys.stderr if descriptor(options.output or "") == STANDARD_OUTPUT else None
    )
    if rows.note is not None:
        said(rows.note)
    said(found)
    if price is not None:
        prices = ", ".join(f"{one:g}" for one in price)
        said(f"cost             {cost(found.usage, price):>12.4f} at {prices} per million tokens")
    if isinstance(found, BatchSummary):
        return 1 if found.failed or found.failed_before or found.stopped else 0
    return 1 if found.failed else 0


def _run_batch(program: Any, rows: InputRows, options: argparse.Namespace, backend: Any) -> Any:
    found = program.run_batch(
        rows,
        out=options.output,
        concurrency=options.concurrency,
        progress=(sys.stderr.isatty() if options.progress is None else options.progress)
        and not options.dry_run,
        key=options.key,
        look_ahead=options.look_ahead,
        rerun=options.rerun,
        trace=options.trace,
        trace_rows=options.trace_rows,
        dry_run=options.dry_run,
        priority=options.priority,
        give_up_after=GIVE_UP_AFTER_S if options.give_up_after is None else options.give_up_after,
        backend=backend,
    )
    return run_async(found) if inspect.isawaitable(found) else found


def _run_once(program: Any, arguments: dict[str, Any], backend: Any) -> int:
    state = program.run(**arguments, backend=backend)
    if inspect.isawaitable(state):
        state = run_async(state)
    error = state.error()
    names = [call.name for call in state.trace.walk() if call.kind in ("gen", "select", "decide")]
    for name in dict.fromkeys(names):
        if name not in state:
            continue  # a variable of a branch; the tree below shows it
        with contextlib.suppress(ProgramError):  # raised below
            _print(name, state[name])
    if state.ret_value is not None and not isinstance(state.ret_value, type(state)):
        _print("returned", state.ret_value)
    print()
    print(state.trace)
    if error is not None:
        raise error
    return 0


def _print(name: str, value: Any) -> None:
    print(f"{name} = {value if isinstance(value, str) else repr(value)}")
