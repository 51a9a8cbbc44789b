"""Figures of a load test as tables of text, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.bench.plan import COMPARED, Series, ratios

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


@dataclass(frozen=True)
class Table:
    """A table of text.

    `rows[0]` is the heading. The first `left` columns are names, aligned left; the others are numbers.
    """

    rows: list[list[str]]
    left: int


def figures_table(series: Sequence[Series]) -> Table:
    """One row for each phase, endpoint and rate: medians over the runs, times in milliseconds."""
    several = len({one.endpoint for one in series}) > 1
    rated = any(one.rate is not None for one in series)
    lines = [one.median for one in series]
    columns = [column for column in COLUMNS if any(column[1](line) for line in lines)]
    head = ["workload", *(["endpoint"] if several else []), *(["rate"] if rated else [])]
    rows = [[*head, *(name for name, _ in columns)]]
    for one, line in zip(series, lines, strict=True):
        names = [one.workload, *([one.endpoint] if several else []), *([_rate(one.rate)] if rated else [])]
        rows.append([*names, *(show(line) for _, show in columns)])
    return Table(rows, len(head))


def ratios_table(series: Sequence[Series]) -> Table | None:
    """The ratios of the first endpoint's figures to the second's, for each phase and rate.

    None if there is only one endpoint.
    """
    compared = ratios(series)
    if not compared:
        return None
    rated = any(line["rate"] is not None for line in compared)
    names = [name for name in COMPARED if any(name in line for line in compared)]
    rows = [[compared[0]["ratio"], *(["rate"] if rated else []), *(COMPARED[name][0] for name in names)]]
    for line in compared:
        values = [f"{line[name]:.2f}x" if name in line else "" for name in names]
        rows.append([line["workload"], *([_rate(line["rate"])] if rated else []), *values])
    return Table(rows, 2 if rated else 1)


def terminal(series: Sequence[Series]) -> str:
    """The text for the terminal: both tables, and the first error of each phase with failed requests."""
    parts = [_aligned(figures_table(series))]
    if (compared := ratios_table(series)) is not None:
        parts.append(_aligned(compared))
    several = len({one.endpoint for one in series}) > 1
    failed = [
        f"first error of {one.workload}{f' on {one.endpoint}' if several else ''}: {line['first_error']}"
        for one in series
        if (line := one.median)["failed"]
    ]
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])])


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:g}/s"


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < table.left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table.rows
    )


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: "" if line.get(name) is None else format(line[name], form)


def _milliseconds(name: str, rank: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda line: "" if line.get(name) is None else format(1000 * line[name][rank], ".1f")


COLUMNS: list[Column] = [
    ("req/s", _number("requests_per_s", ".2f")),
    ("out tok/s", _number("output_tokens_per_s", ".1f")),
    *(
        (f"{label} {rank}", _milliseconds(name, rank))
        for label, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
        for rank in ("p50", "p99")
    ),
    ("cached", _number("cached_share", ".0%")),
    ("good/s", _number("goodput_per_s", ".2f")),
    ("good", _number("goodput_share", ".0%")),
    ("valid", _number("valid_share", ".0%")),
    ("failed", lambda line: f"{line['failed']}" if line["failed"] else ""),
    ("client CPU", _number("client_cpu_share", ".0%")),
]
