"""Figures of a load test as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramify.bench.plan import COMPARED, Series, ratios

HEADS = {
    "requests_per_s": "req/s",
    "output_tokens_per_s": "out tok/s",
    "ttft_p50": "TTFT p50",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "e2e_p50": "E2E p50",
    "valid_per_s": "valid/s",
}
"""Of the ratios of `COMPARED`."""

Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def table(series: Sequence[Series]) -> str:
    """One line for each phase, endpoint and rate; medians over the runs, times in milliseconds."""
    several = len({one.endpoint for one in series}) > 1
    rated = any(one.rate is not None for one in series)
    lines = [one.median for one in series]
    columns = [column for column in COLUMNS if any(column[1](line) for line in lines)]
    head = ["workload", *(["endpoint"] if several else []), *(["rate"] if rated else [])]
    rows = [[*head, *(name for name, _ in columns)]]
    for one, line in zip(series, lines, strict=True):
        rate = "" if one.rate is None else f"{one.rate:g}/s"
        start = [one.workload, *([one.endpoint] if several else []), *([rate] if rated else [])]
        rows.append([*start, *(show(line) for _, show in columns)])
    text = _aligned(rows, len(head))
    compared = ratios(series)
    if compared:
        text += "\n\n" + _aligned(_ratio_rows(compared, rated), 2 if rated else 1)
    failed = [
        f"{one.workload}{f' on {one.endpoint}' if several else ''}: {line['first_error']}"
        for one, line in zip(series, lines, strict=True)
        if line["failed"]
    ]
    return text + ("\n\nfirst error of " + "\nfirst error of ".join(failed) if failed else "")


def _ratio_rows(compared: Sequence[Mapping[str, Any]], rated: bool) -> list[list[str]]:
    names = [name for name in COMPARED if any(name in line for line in compared)]
    heads = [HEADS[name] for name in names]
    rows = [[compared[0]["ratio"], *(["rate"] if rated else []), *heads]]
    for line in compared:
        rate = ["" if line["rate"] is None else f"{line['rate']:g}/s"] if rated else []
        values = [f"{line[name]:.2f}x" if name in line else "" for name in names]
        rows.append([line["workload"], *rate, *values])
    return rows


def _aligned(rows: Sequence[Sequence[str]], left: int) -> str:
    """The first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
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
        for label, name in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
        for rank in ("p50", "p99")
    ),
    ("cached", _number("cached_share", ".0%")),
    ("good/s", _number("goodput_per_s", ".2f")),
    ("good", _number("goodput_share", ".0%")),
    ("valid", _number("valid_share", ".0%")),
    ("failed", lambda line: f"{line['failed']}" if line["failed"] else ""),
    ("client CPU", _number("client_cpu_share", ".0%")),
]
