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
LONG = 60
"""Least number of characters in the words of a row that is not written twice."""


def parts() -> dict[str, str]:
    """Title of a list → its Markdown. What an earlier list has already is not written again: see `Shown`."""
    shown = Shown()
    alike = (REQUEST, SAMPLING, OTHER_SERVERS)
    every = {"alike": shown.fields(joined(alike), "OpenAI's endpoints")}
    for endpoint in (*ENDPOINTS, BATCH_FIELDS):
        here = f"`{endpoint.path}`"
        body = joined([*(table for table in endpoint.shared if table not in alike), endpoint.body])
        every[endpoint.title] = shown.fields(body, here) + shown.objects(endpoint.inner, here)
    every["output limits"] = limits()
    return every


def limits() -> str:
    """A line for each endpoint that generates: the field that limits the output, and its default."""
    rows = ["| endpoint | field | left out |", "| --- | --- | --- |"]
    for one in ENDPOINTS:
        if one.limit:
            default = (
                f"{one.default_tokens} tokens" if one.default_tokens else "as many as fit into the context"
            )
            default = "refused: it is required" if one.limit in one.required else default
            rows.append(f"| `{one.path}` | `{one.limit}` | {default} |")
    return "\n".join(rows) + "\n"


def joined(tables: Iterable[FieldTable]) -> FieldTable:
    return FieldTable("", *(row for table in tables for row in table.rows))


class Shown:
    """The rows and objects that the lists so far have. A later list names the place of an equal one."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], str] = {}
        self._tables: set[FieldTable] = set()
        self._objects: dict[str, tuple[str, str]] = {}

    def fields(self, table: FieldTable, here: str) -> str:
        """A line for each row, and the names that are refused."""
        lines = ["| fields | |", "| --- | --- |"]
        again: dict[str, list[str]] = {}
        for row in table.rows:
            if row.effect == "refused":
                continue
            cells = ticked(row.names), words(row)
            where = self._rows.setdefault(cells, here)
            if where == here or len(row.words) < LONG:
                lines.append(f"| {cells[0]} | {cells[1]} |")
            else:
                effect = "no effect, " if row.effect == "ignored" else ""
                again.setdefault(f"{effect}as for {where}", []).extend(row.names)
        lines += [f"| {ticked(names)} | {text} |" for text, names in again.items()]
        refused = table.names("refused")
        return "\n".join(lines) + "\n" + (f"\nRefused: {ticked(refused)}.\n" if refused else "")

    def objects(self, tables: Iterable[FieldTable], here: str) -> str:
        """A line for all objects in the body that have equal fields."""
        lines: dict[str, list[str]] = {}
        for table in tables:
            if table in self._tables:  # a table is listed with the first endpoint that has it
                continue
            self._tables.add(table)
            cells = " | ".join(ticked(table.names(effect)) for effect in ("taken", "ignored", "refused"))
            path, where = self._objects.setdefault(cells, (table.path, here))
            if where != here:
                cells = min(cells, f"as `{path}` of {where} |  | ", key=len)
            lines.setdefault(cells, []).append(table.path)
        head = ["", "| object | taken | no effect | refused |", "| --- | --- | --- | --- |"]
        rows = [f"| {ticked(paths)} | {cells} |" for cells, paths in lines.items()]
        return "\n".join([*head, *rows]) + "\n" if rows else ""


def words(row: Row) -> str:
    if row.effect == "taken":
        return row.words
    return f"no effect: {row.words}" if row.words else "no effect"


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
