"""The rows of `ramify run --input`: CSV, JSON lines or Parquet, read lazily."""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest, NotFound

PARQUET_ROWS = 1024
"""Rows decoded at a time."""


def read_rows(
    path: str, program: Any, common: Sequence[str], key: str | None, only: str | None
) -> Iterator[Any]:
    """The rows of `path` as arguments of `program`, except those in `common`, which are the same for all
    rows.

    `only` are the columns to pass, separated by commas; `key` is read as well. Raises `InvalidRequest` where
    the first row has a column that the program does not take, or lacks a required one. A row that cannot be
    read is passed on as it is, and becomes a row with an error.
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
            remedy=f"--columns {','.join(name for name in taken if name != key)} leaves the others out.",
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


def _csv(path: str, program: Any) -> Iterator[Any]:
    """Cells are read like command-line arguments; an empty cell takes the parameter's default."""
    csv.field_size_limit(sys.maxsize)
    parameters = inspect.signature(program.body, eval_str=True).parameters
    with open(path, newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file, restkey="", restval=None):
            if "" in row or None in row.values():
                yield f"line with {'more' if '' in row else 'fewer'} fields than columns"
                continue
            yield {
                name: json_or_text(cell, parameters.get(name))
                for name, cell in row.items()
                if cell or not _has_default(parameters.get(name))
            }


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
    with open(path, encoding="utf-8-sig") as file:
        for line in file:
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:
                    yield line


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


_READERS: dict[str, Callable[[str, Any], Iterator[Any]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
