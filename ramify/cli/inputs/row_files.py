"""Files of rows: CSV, JSON lines and Parquet, from a path or a pipe.

The whole file is checked before any row is used, for a wrong encoding and for faults that would silently lose
or mix up rows.

    a,b         Refused, with the number of the line: a quote that is not closed, a header with an empty or
    1,"x        repeated column name, bytes that are not UTF-8, and NUL characters.
    2,y
    3,z,4       A row with more or fewer fields than the header becomes an `Unreadable`, a row with an error.
"""

from __future__ import annotations

import csv
import functools
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ramify.errors import InvalidRequest, NotFound
from ramify.lang.batch.keys import Unreadable
from ramify.spelling import nearest

PARQUET_ROWS = 1024
"""Number of rows that are decoded at a time."""
DELIMITERS = ";\t|"
"""Characters, other than the comma, that may separate the columns in a file called CSV."""
STANDARD = "-"
"""The name that stands for standard input and standard output."""
UTF_16_AND_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
"""Byte order marks of UTF-16 and UTF-32."""
ESCAPED = re.compile("[\udc80-\udcff]")
"""The surrogates to which Python's surrogateescape decodes bytes that are not UTF-8."""


@dataclass(frozen=True)
class Columns:
    """The use of a file's columns by the program and the command line."""

    only: frozenset[str] | None = None
    """The columns that are passed to the program; None: all."""
    key: str | None = None
    """The key column; None for none."""
    needed: frozenset[str] = frozenset()
    """Columns that the program requires."""
    taken: frozenset[str] | None = None
    """Columns that the program accepts; None: any."""

    @property
    def used(self) -> frozenset[str] | None:
        return self.only if self.only is None or self.key is None else self.only | {self.key}

    def without(self, left_out: str, others: Sequence[str]) -> str:
        """The end of a remedy that says how to leave the column `left_out` out and pass `others`.

        Empty if the program needs `left_out`.
        """
        passed = [one for one in others if self.taken is None or one in self.taken]
        if left_out == self.key or not passed or not self.needed <= set(passed):
            return ""
        return f", or leave it out: --columns {','.join(passed)}"


@dataclass(frozen=True)
class RowFile:
    """A file that can be read several times."""

    name: str
    """The path as given by the user, or "standard input"."""
    path: str
    suffix: str
    columns: Columns
    copied: Any = None
    """The temporary copy of a pipe; None for a file. The copy is removed when the last reference to it is
    gone."""

    def rows(self, program: Any) -> Iterator[Any]:
        """The rows as arguments of `program`."""
        return _FORMATS[self.suffix][0](self, program)

    @functools.cached_property
    def count(self) -> int:
        """Number of rows.

        Raises `InvalidRequest`, with the line's number, if the file cannot be read as rows.
        """
        return _FORMATS[self.suffix][1](self)


def open_rows(name: str, columns: Columns) -> RowFile:
    """Open and check the file of rows `name`; "-" is standard input.

    A pipe, which can be read only once, is first copied to a temporary file. If its name has no known suffix,
    the first bytes tell the format. Raises `NotFound` or `InvalidRequest` if there is no such file, or it is
    not a file of rows.
    """
    path = Path(name)
    if name != STANDARD and not path.exists():
        raise NotFound(f"There is no file {name}.", field="input")
    if name != STANDARD and path.is_dir():
        raise InvalidRequest(f"{name} is a folder.", field="input", remedy="Name a file in it.")
    copied = None
    if name == STANDARD or not path.is_file() or name.startswith("/dev/"):
        copied = _copy(name)
        path = Path(copied.name)
        suffix = Path(name).suffix.lower()
        suffix = suffix if suffix in _FORMATS else _told_suffix(path)
    else:
        suffix = path.suffix.lower()
        if suffix not in _FORMATS:
            raise InvalidRequest(
                f"{name} is none of {', '.join(_FORMATS)}.", field="input", remedy="Rename or convert it."
            )
    shown = "standard input" if name == STANDARD else name
    if not path.stat().st_size:
        raise InvalidRequest(
            f"{shown} is empty: it has no bytes.",
            field="input",
            remedy="See whether what was to write it has failed. No rows are a header alone, in a .csv.",
        )
    found = RowFile(shown, str(path), suffix, columns, copied)
    try:
        found.count  # noqa: B018  # checks all rows before the first one runs
    except PermissionError as error:
        raise InvalidRequest(f"{shown} cannot be read: {error.strerror}.", field="input") from None
    return found


def _copy(name: str) -> Any:
    copied = tempfile.NamedTemporaryFile(prefix="ramify-rows-")  # noqa: SIM115  # closed with the rows
    try:
        if name == STANDARD:
            if sys.stdin is None:
                raise InvalidRequest("Standard input is closed.", field="input", remedy="Name a file.")
            shutil.copyfileobj(sys.stdin.buffer, copied)
        else:
            with open(name, "rb") as pipe:
                shutil.copyfileobj(pipe, copied)
        copied.flush()
    except OSError as error:
        copied.close()
        raise InvalidRequest(
            f"The rows of {name} cannot be copied to {copied.name}: {error.strerror}.",
            field="input",
            remedy="Name another folder in TMPDIR, or write the rows to a file and name that.",
        ) from None
    return copied


def _told_suffix(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return ".parquet"
    return ".jsonl" if start.startswith((b"{", b"[")) else ".csv"


# --- text ---------------------------------------------------------------------------------------


@contextmanager
def _lines(rows: RowFile, newline: str | None = None) -> Iterator[Iterator[str]]:
    """The lines of a text file.

    Reading them raises `InvalidRequest`, with the line's number, for a line that is not UTF-8 or has a NUL
    character.
    """
    with open(rows.path, newline=newline, encoding="utf-8-sig") as file:
        try:
            yield _checked(file, rows.name)
        except UnicodeDecodeError as error:
            number, encoding = _not_utf8(rows.path)
            raise InvalidRequest(
                f"Line {number} of {rows.name} is not UTF-8: {error.reason}.",
                field="input",
                remedy=f"Convert the file, as with iconv -f {encoding} -t utf-8.",
            ) from None


def _checked(file: IO[str], name: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise InvalidRequest(
                f"Line {number} of {name} has a NUL character.",
                field="input",
                remedy="Remove it; or if the file is UTF-16, convert it: iconv -f utf-16le -t utf-8.",
            )
        yield line


def _not_utf8(path: str) -> tuple[int, str]:
    """The number of the first line that is not UTF-8, and the encoding that the file probably has."""
    with open(path, "rb") as file:
        if file.read(4).startswith(UTF_16_AND_32):
            return 1, "utf-16"
    with open(path, encoding="utf-8", errors="surrogateescape") as text:
        bad = (number for number, line in enumerate(text, 1) if ESCAPED.search(line))
        return next(bad, 1), "latin1"


# --- CSV ----------------------------------------------------------------------------------------


def _records(rows: RowFile, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the record's last line, fields) for each record that is not empty."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(lines, strict=True)
    while True:
        first = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error:
            last = reader.line_num
            where = f"Line {first}" if first == last else f"Lines {first} to {last}"
            raise InvalidRequest(
                f"{where} of {rows.name}: the field that begins with a quote does not end with one.",
                field="input",
                remedy='Close the quote before the comma or the end of the line; a quote inside is "".',
            ) from None
        if record is None:
            return
        if record:
            yield reader.line_num, record


def _csv(rows: RowFile, program: Any) -> Iterator[Any]:
    """Yield the rows of a CSV file.

    Cells are parsed like command-line arguments. An empty cell means the default of the parameter, if it has
    one.
    """
    parameters = inspect.signature(program.body, eval_str=True).parameters
    used, key = rows.columns.used, rows.columns.key
    with _lines(rows, newline="") as lines:
        records = _records(rows, lines)
        header = next(records, (0, []))[1]
        for index, (number, record) in enumerate(records):
            if len(record) != len(header):
                remedy = "; quote the comma" if len(record) > len(header) else ""
                fields = "1 field" if len(record) == 1 else f"{len(record)} fields"
                cell = _key_cell(header, record, key)
                yield Unreadable(
                    f"Row {index} (line {number}) has {fields}, the header {len(header)}{remedy}.",
                    json_or_text(cell, parameters.get(key or "")) if cell else None,
                )
                continue
            yield {
                name: json_or_text(cell, parameters.get(name))
                for name, cell in zip(header, record, strict=True)
                if (cell or not _has_default(parameters.get(name))) and (used is None or name in used)
            }


def _key_cell(header: Sequence[str], record: Sequence[str], key: str | None) -> str:
    """The key in a record that is longer or shorter than the header.

    Returns the record's first field if the key column is the first. Returns the last field if the key column
    is the last and the record is longer than the header. Returns "" otherwise.
    """
    if header[0] == key:
        return record[0]
    return record[-1] if header[-1] == key and len(record) > len(header) else ""


def _count_csv(rows: RowFile) -> int:
    with _lines(rows, newline="") as lines:
        records = _records(rows, lines)
        header = next(records, (0, []))[1]
        if not header:
            raise InvalidRequest(
                f"{rows.name} has no header: its lines are empty.",
                field="input",
                remedy="Name the columns in its first line.",
            )
        _check_delimiter(header, rows.name)
        _check_names(header, rows)
        return sum(1 for _ in records)


def _check_delimiter(header: Sequence[str], name: str) -> None:
    found = next((sign for sign in DELIMITERS if sign in "".join(header)), None)
    if len(header) == 1 and found is not None:
        raise InvalidRequest(
            f"The header of {name} is one column {header[0]!r}: is the delimiter {found!r}?",
            field="input",
            remedy="Separate the columns by commas.",
        )


def _check_names(header: Sequence[str], rows: RowFile) -> None:
    """Raise `InvalidRequest` if a column that is used has no name or occurs twice, or if a column that was
    asked for is missing."""
    known: dict[str, int] = {}
    columns, used = rows.columns, rows.columns.used
    for place, name in enumerate(header, 1):
        if used is not None and name not in used:
            continue
        if not name.strip() or name in known:
            others = list(dict.fromkeys(one for one in header if one.strip() and header.count(one) == 1))
            what = (
                f"{name!r} twice, as columns {known[name]} and {place}"
                if name in known
                else f"no column {place}"
            )
            raise InvalidRequest(
                f"The header of {rows.name} names {what}.",
                field="input",
                remedy=f"Give it a name of its own{columns.without(name, others)}.",
            )
        known[name] = place
    key = frozenset() if columns.key is None else frozenset([columns.key])
    for field, wanted in (("key", key), ("columns", columns.only or frozenset())):
        if lacking := sorted(wanted - set(header)):
            raise InvalidRequest(
                f"{rows.name} has no column {lacking[0]!r}; it has {', '.join(header)}.",
                field=field,
                remedy=nearest(lacking[0], header),
            )


def _has_default(parameter: inspect.Parameter | None) -> bool:
    return (
        parameter is not None
        and parameter.annotation is not str
        and parameter.default is not inspect.Parameter.empty
    )


def json_or_text(value: str, parameter: inspect.Parameter | None) -> Any:
    """`value` parsed as JSON; `value` itself if the parameter is a str, or if it is not JSON."""
    if parameter is None or parameter.annotation is str:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# --- JSON lines ---------------------------------------------------------------------------------


class _Twice(ValueError):
    """An object has the same key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return found


def _jsonl(rows: RowFile, program: Any) -> Iterator[Any]:
    used, key = rows.columns.used, rows.columns.key
    with _lines(rows) as lines:
        present = ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())
        for index, (number, line) in enumerate(present):
            known = None
            try:
                row = json.loads(line, object_pairs_hook=_unique)
            except _Twice as name:
                why = f"has an object with the key {str(name)!r} twice"
                known = _some(json.loads(line), {key} - {str(name)})
            except json.JSONDecodeError as error:
                why = f"is not JSON: {error.msg} at column {error.colno}"
            except ValueError as error:  # a number of more than 4,300 digits
                why = f"is not JSON: {error}"
            except RecursionError:
                why = "is nested too deep"
            else:
                yield row if used is None else _some(row, used)
                continue
            found = known[key] if isinstance(known, dict) and key in known else _first_value(line, key)
            yield Unreadable(f"Row {index} (line {number}) {why}.", found)


def _first_value(line: str, key: str | None) -> Any:
    """The value of `key` in a line that is not valid JSON, if `key` comes first and its value is complete;
    else None."""
    if key is None:
        return None
    begin = re.match(rf"{{\s*{re.escape(json.dumps(key, ensure_ascii=False))}\s*:\s*", line)
    try:
        value, end = json.JSONDecoder().raw_decode(line, begin.end()) if begin else (None, 0)
    except (ValueError, RecursionError):
        return None
    return value if line[end:].lstrip().startswith(",") else None


def _some(row: Any, wanted: Container[Any]) -> Any:
    if not isinstance(row, dict):
        return row
    return {name: value for name, value in row.items() if name in wanted}


def _count_jsonl(rows: RowFile) -> int:
    first, count = "", 0
    with _lines(rows) as lines:
        for line in lines:
            if line.strip():
                first, count = first or line.strip(), count + 1
    if _is_array(first, count):
        raise InvalidRequest(
            f"{rows.name} is one JSON array; JSON lines have one object a line.",
            field="input",
            remedy="Convert it: jq -c '.[]' FILE.json > FILE.jsonl.",
        )
    return count


def _is_array(first: str, count: int) -> bool:
    """Whether a file of `count` lines is one JSON array: its first line, `first`, opens the array or contains
    all of it."""
    if not first.startswith("[") or first[1:].lstrip()[:1] not in ("", "{", "[", "]"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return count > 1
    return count == 1


# --- Parquet ------------------------------------------------------------------------------------


def _opened_parquet(rows: RowFile) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InvalidRequest(
            f"{rows.name} needs pyarrow, which is not installed.",
            field="input",
            remedy='pip install "ramify-llm[parquet]", or convert the file to .jsonl.',
        ) from None
    try:
        return parquet.ParquetFile(rows.path)
    except (ArrowException, OSError) as error:
        raise InvalidRequest(f"{rows.name} is not Parquet: {error}.", field="input") from None


def _parquet(rows: RowFile, program: Any) -> Iterator[Any]:
    with _opened_parquet(rows) as file:
        columns = None
        if (used := rows.columns.used) is not None:
            columns = [name for name in file.schema_arrow.names if name in used]
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
            yield from batch.to_pylist()


def _count_parquet(rows: RowFile) -> int:
    with _opened_parquet(rows) as file:
        _check_names(file.schema_arrow.names, rows)
        count: int = file.metadata.num_rows
    return count


_FORMATS: dict[str, tuple[Callable[[RowFile, Any], Iterator[Any]], Callable[[RowFile], int]]] = {
    ".csv": (_csv, _count_csv),
    ".jsonl": (_jsonl, _count_jsonl),
    ".parquet": (_parquet, _count_parquet),
}
"""Suffix → (function that reads the rows, function that checks the file and counts the rows)."""
