"""A program as a sync and as an async function, and its batches with their results files."""

from __future__ import annotations

import asyncio
import json

import ramify as rm

UNLUCKY = 13
"""Row whose body raises."""


@rm.function
def double(s, n, factor=2):
    if n == UNLUCKY:
        raise ValueError("unlucky")
    s += f"{n} times {factor} is" + rm.gen("x", schema=int)
    return s["x"] + 1


@rm.function
async def adouble(s, n, factor=2):
    if n == UNLUCKY:
        raise ValueError("unlucky")
    s += f"{n} times {factor} is" + rm.gen("x", schema=int)
    return await s.aget("x") + 1


def answer(request):
    n, factor = request.prompt[0].removesuffix(" is").split(" times ")
    return str(int(n) * int(factor))


def ret_values(states):
    """The return values of the rows; None for a row that failed."""
    return [None if state.error() else state.ret_value for state in states]


def returned(n):
    """Return value of `double` for `n` and factor 2; None where the row fails."""
    return None if n == UNLUCKY else 2 * n + 1


def run(program, rows, **options):
    """`run_batch`, also of an async program. The default backend is a script for `double`."""
    options.setdefault("backend", rm.ScriptedBackend(answer))
    found = program.run_batch(rows, **options)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


def lines(out):
    """The results in a file, without headers, in the order in which they were written."""
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in found if "index" in line]


def by_index(out):
    """The results in a file, in the order of the rows."""
    return sorted(lines(out), key=lambda line: line["index"])
