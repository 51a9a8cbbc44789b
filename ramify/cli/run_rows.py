"""The rows of `ramify run --input`: CSV, JSON lines or Parquet, read lazily."""

from __future__ import annotations

import contextlib
import csv
import functools
import inspect
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ramify.errors import InvalidRequest, NotFound
from ramify.lang.batch.results import Numbered, Unreadable

PARQUET_ROWS = 1024
"""Rows decoded at a time."""
DELIMITERS = ";\t|"
"""Signs that separate the columns of files that are called CSV, beside the comma."""


class InputRows:
    """The rows of `path` (`read_rows`), or with `limit` the first of them, or with `sample` as many drawn at
    random with `seed`. Raises what `read_rows` raises at once."""

    def __init__(
        self,
        path: str,
        program: Any,
        common: Sequence[str],
        key: str | None,
        only: str | None,
        *,
        limit: int | None = None,
        sample: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._read = functools.partial(read_rows, path, program, common, key, only)
        self._path, self._limit, self._sample, self._seed = path, limit, sample, seed or 0
        for name, value in (("limit", limit), ("sample", sample)):
            if value is not None and value < 1:
                raise InvalidRequest(f"--{name} is {value}; it must be at least 1.", field=name)
        if limit is not None and sample is not None:
            raise InvalidRequest("--limit and --sample exclude each other; give one.", field="sample")
        if seed is not None and sample is None:
            raise InvalidRequest("--sample-seed needs --sample.", field="sample_seed")
        self._read()

    @functools.cached_property
    def _total(self) -> int:
        """Number of rows in the file."""
        return _COUNTERS[Path(self._path).suffix.lower()](self._path)

    def __len__(self) -> int:
        return min([self._total, *(size for size in (self._limit, self._sample) if size is not None)])

    def __iter__(self) -> Iterator[Any]:
        if self._sample is None:
            return itertools.islice(self._read(), self._limit)
        chosen = set(random.Random(self._seed).sample(range(self._total), len(self)))
        return (Numbered(index, row) for index, row in enumerate(self._read()) if index in chosen)

    @property
    def note(self) -> str | None:
        """Which rows were chosen; None where all are."""
        if self._sample is not None:
            return f"a sample of {len(self)} of {self._total} rows (--sample-seed {self._seed})"
        return None if self._limit is None else f"the first {len(self)} of {self._total} rows"


def read_rows(
    path: str, program: Any, common: Sequence[str], key: str | None, only: str | None
) -> Iterator[Any]:
    """The rows of `path` as arguments of `program`, except those in `common`, which are the same for all
    rows.

    `only` are the columns to pass, separated by commas; `key` is read as well. Raises `InvalidRequest` where
    the first row has a column that the program does not take, or lacks a required one, and where the file is
    not UTF-8. A row that cannot be read is passed on as `Unreadable`, and becomes a row with an error.
    """
    rows = _open(path, program)
    if only is not None:
        wanted = {name.strip() for name in only.split(",")} | ({key} if key else set())
        rows = (_some(row, wanted) for row in rows)
    first = next(rows, None)
    if first is None:
        return iter(())
    if isinstance(first, Mapping):
        _check(first, program, set(common), key, path)
    return itertools.chain([first], rows)


def _open(path: str, program: Any) -> Iterator[Any]:
    if not Path(path).is_file():
        raise NotFound(f"There is no file {path}.", field="input")
    reader = _READERS.get(Path(path).suffix.lower())
    if reader is None:
        raise InvalidRequest(
            f"{path} is none of {', '.join(_READERS)}.", field="input", remedy="Rename or convert it."
        )
    return reader(path, program)


def _check(row: Mapping[str, Any], program: Any, common: set[str], key: str | None, path: str) -> None:
    parameters = inspect.signature(program.body).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    taken = [name for name in row if name in program.arg_names or name == key]
    extra = [name for name in row if name not in taken]
    if extra and not takes_any:
        raise InvalidRequest(
            f"The program has no parameter {extra[0]!r}, which is a column of {path}.",
            field="input",
            remedy=f"--columns {','.join(passed)} leaves the others out."
            if (passed := [name for name in taken if name != key])
            else f"It has {', '.join(program.arg_names) or 'none'}.",
        )
    both = sorted(common & set(taken))
    if both:
        raise InvalidRequest(f"{both[0]} is given on the command line and is a column of {path}.")
    lacking = [name for name in required(program) if name not in row and name not in common]
    if lacking:
        raise InvalidRequest(
            f"The program needs {lacking[0]!r}; the columns read from {path} are {', '.join(row) or 'none'}.",
            field="input",
        )


def required(program: Any) -> list[str]:
    """The names of the parameters of `program` without defaults."""
    parameters = inspect.signature(program.body).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name in program.arg_names
        if parameters[name].default is inspect.Parameter.empty and parameters[name].kind not in several
    ]


def _some(row: Any, wanted: set[str]) -> Any:
    if not isinstance(row, Mapping):
        return row
    return {name: value for name, value in row.items() if name in wanted}


# --- formats ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: str, newline: str | None = None) -> Iterator[IO[str]]:
    """The file as text; reading it raises `InvalidRequest` with the line where it is not UTF-8."""
    with open(path, newline=newline, encoding="utf-8-sig") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"Line {_not_utf8(path)} of {path} is not UTF-8: {error.reason}.",
                field="input",
                remedy="Convert the file, as with iconv -f latin1 -t utf-8.",
            ) from None


def _not_utf8(path: str) -> int:
    """The number of the first line that is not UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise AssertionError("every line is UTF-8")


def _csv(path: str, program: Any) -> Iterator[Any]:
    """Cells are read like command-line arguments; an empty cell takes the parameter's default."""
    csv.field_size_limit(sys.maxsize)
    parameters = inspect.signature(program.body, eval_str=True).parameters
    with _opened(path, newline="") as file:
        reader = csv.reader(file)
        header = next((row for row in reader if row), [])
        _check_delimiter(header, path)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                remedy = "; quote the comma" if len(row) > len(header) else ""
                fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                yield Unreadable(f"Line {reader.line_num} has {fields}, the header {len(header)}{remedy}.")
                continue
            yield {
                name: json_or_text(cell, parameters.get(name))
                for name, cell in zip(header, row, strict=True)
                if cell or not _has_default(parameters.get(name))
            }


def _check_delimiter(header: Sequence[str], path: str) -> None:
    found = next((sign for sign in DELIMITERS if sign in "".join(header)), None)
    if len(header) == 1 and found is not None:
        raise InvalidRequest(
            f"The header of {path} is one column {header[0]!r}: is the delimiter {found!r}?",
            field="input",
            remedy="Separate the columns by commas.",
        )


def _has_default(parameter: inspect.Parameter | None) -> bool:
    return (
        parameter is not None
        and parameter.annotation is not str
        and parameter.default is not inspect.Parameter.empty
    )


def json_or_text(value: str, parameter: inspect.Parameter | None) -> Any:
    """`value` read as JSON, unless the parameter is a str or that fails."""
    if parameter is None or parameter.annotation is str:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _jsonl(path: str, program: Any) -> Iterator[Any]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    yield Unreadable(f"Line {number} is not JSON: {error}.")


def _parquet(path: str, program: Any) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidRequest(
            f"{path} needs pyarrow, which is not installed.",
            field="input",
            remedy='pip install "ramify-llm[parquet]", or convert the file to .jsonl.',
        ) from None

    def rows() -> Iterator[Any]:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()

    return rows()


def _count_csv(path: str) -> int:
    csv.field_size_limit(sys.maxsize)
    with _opened(path, newline="") as file:
        return max(sum(1 for row in csv.reader(file) if row) - 1, 0)


def _count_jsonl(path: str) -> int:
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip(b" \t\r\n\xef\xbb\xbf"))


def _count_parquet(path: str) -> int:
    from pyarrow import parquet

    count: int = parquet.read_metadata(path).num_rows
    return count


_COUNTERS = {".csv": _count_csv, ".jsonl": _count_jsonl, ".parquet": _count_parquet}
_READERS: dict[str, Callable[[str, Any], Iterator[Any]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
