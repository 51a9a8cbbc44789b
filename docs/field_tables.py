"""Writes the lists of fields in docs/server.md from `ramify.runtime.server.tables`.

``python docs/field_tables.py``. With ``--check`` it only compares, and exits with 1 if a list differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import generated_part

from ramify.runtime.server.tables import ENDPOINTS
from ramify.runtime.server.tables.batches import BATCH_FIELDS
from ramify.runtime.server.tables.openai import OTHER_SERVERS, REQUEST, SAMPLING
from ramify.runtime.server.tables.rows import FieldTable, Row

PAGE = Path(__file__).parent / "server.md"
END = "<!-- /fields -->"


def parts() -> dict[str, str]:
    """Title of a list → its Markdown."""
    alike = (REQUEST, SAMPLING, OTHER_SERVERS)
    every = {"alike": fields_of(joined(alike))}
    listed: set[FieldTable] = {*alike}  # a table is listed with the first endpoint that has it
    for endpoint in (*ENDPOINTS, BATCH_FIELDS):
        body = joined([*(table for table in endpoint.shared if table not in listed), endpoint.body])
        every[endpoint.title] = fields_of(body)
        every[endpoint.title] += objects_of(table for table in endpoint.inner if table not in listed)
        listed.update(endpoint.shared, endpoint.inner)
    return every


def joined(tables: Iterable[FieldTable]) -> FieldTable:
    return FieldTable("", *(row for table in tables for row in table.rows))


def fields_of(table: FieldTable) -> str:
    """A line for each row, and the names that are refused."""
    lines = ["| fields | |", "| --- | --- |"]
    lines += [f"| {ticked(row.names)} | {words(row)} |" for row in table.rows if row.effect != "refused"]
    refused = table.names("refused")
    return "\n".join(lines) + "\n" + (f"\nRefused: {ticked(refused)}.\n" if refused else "")


def words(row: Row) -> str:
    if row.effect == "taken":
        return row.words
    return f"no effect: {row.words}" if row.words else "no effect"


def objects_of(tables: Iterable[FieldTable]) -> str:
    """A line for each object in the body."""
    lines = ["", "| object | taken | no effect | refused |", "| --- | --- | --- | --- |"]
    for table in tables:
        cells = [ticked(table.names(effect)) for effect in ("taken", "ignored", "refused")]
        lines.append(f"| `{table.path}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" if len(lines) > 3 else ""


def ticked(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    wrong = 0
    for title, part in parts().items():
        begin = f"<!-- fields: {title} -->\n"
        if begin not in PAGE.read_text():
            print(f"{PAGE} has no line {begin}")
            wrong = 1
            continue
        wrong |= generated_part.main(PAGE, begin, END, f"\n{part}\n")
    raise SystemExit(wrong)
