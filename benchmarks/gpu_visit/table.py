"""The table of a call: how each part ended, and its main figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_visit.driver import Ended

FACTS = ("device", "driver", "torch", "triton", "python", "commit", "date")
ROWS, WIDTH = 24, 118
"""Rows of a part, and characters of a line. With these, three tables fit the 12,000 characters that a lent
machine returns."""


def table(name: str, parts: Sequence[Ended]) -> str:
    lines = ["=" * 72, f"{name}: {_facts(parts)}"]
    for ended in parts:
        lines.append(f"{ended.part.name:<14}{ended.outcome}, {ended.seconds:.0f} s")
        found = [*_counts(ended.rows), *filter(None, map(_line, ended.rows))]
        lines += [f"  {line}"[:WIDTH] for line in found[:ROWS]]
        if len(found) > ROWS:
            lines.append(f"  … and {len(found) - ROWS} more in {name}.jsonl")
    return "\n".join(lines)


def _facts(parts: Sequence[Ended]) -> str:
    facts: dict[str, Any] = {}
    for ended in parts:
        for row in ended.rows:
            facts |= {key: row[key] for key in FACTS if key in row}
    named = [f"{key} {facts[key]}" for key in FACTS if key in facts]
    return ", ".join(named) or "no versions were found"


def _line(row: Mapping[str, Any]) -> str | None:
    case = re.sub(r"^\S*/(?=\w+\.py::)", "", str(row["case"]))  # of a test, without its folder
    for sort in ("error", "cut"):
        if sort in row:
            first_line = (str(row[sort]).splitlines() or [""])[0]
            return f"{case:<40} {'FAILED' if sort == 'error' else 'cut in'} {first_line}"
    shown = list(_main(row))
    return f"{case:<40} {', '.join(shown)}" if shown else None


def _main(row: Mapping[str, Any]) -> Iterator[str]:
    for key, value in row.items():
        if not isinstance(value, (int, float)):
            continue
        if key.startswith("of_"):
            yield f"{value:.0%} {key.replace('_', ' ')}"
        elif key == "ratio":
            yield f"{value:.2f}x {row.get('of', '')}".rstrip()
        elif key == "tokens_s":
            yield f"{value:.0f} tokens/s"


def _counts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        if "so_far" in row:
            counts.update(row["so_far"])
    if counts:
        yield ", ".join(f"{count} {sort}" for sort, count in counts.items())
