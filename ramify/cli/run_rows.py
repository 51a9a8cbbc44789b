"""The rows of `ramify run --input` as arguments of a program, read lazily."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.cli.row_files import RowFile, open_rows
from ramify.errors import InvalidRequest
from ramify.lang.batch.results import Numbered


class InputRows:
    """The rows of the file `path`, or with `limit` the first of them, or `sample` rows drawn with `seed`.

    Raises at once what `open_rows` and `read_rows` raise.
    """

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
        self._limit, self._sample, self._seed = limit, sample, seed or 0
        for name, value in (("limit", limit), ("sample", sample)):
            if value is not None and value < 1:
                raise InvalidRequest(f"--{name} is {value}; it must be at least 1.", field=name)
        if limit is not None and sample is not None:
            raise InvalidRequest("--limit and --sample exclude each other; give one.", field="sample")
        if seed is not None and sample is None:
            raise InvalidRequest("--sample-seed needs --sample.", field="sample_seed")
        self._rows = open_columns(path, only, key)
        self._check = program, common, key
        self._read()

    def _read(self) -> Iterator[Any]:
        return read_rows(self._rows, *self._check)

    @property
    def _total(self) -> int:
        """Number of rows in the file."""
        return self._rows.count

    def __len__(self) -> int:
        return min([self._total, *(size for size in (self._limit, self._sample) if size is not None)])

    def __iter__(self) -> Iterator[Any]:
        if self._sample is None:
            return itertools.islice(self._read(), self._limit)
        chosen = set(random.Random(self._seed).sample(range(self._total), len(self)))
        return (Numbered(index, row) for index, row in enumerate(self._read()) if index in chosen)

    @property
    def again(self) -> str | None:
        """How the rows are given again, where they came from a pipe; None for a file."""
        return (
            None
            if self._rows.copied is None
            else f"the same command, with the same rows in {self._rows.name}"
        )

    @property
    def note(self) -> str | None:
        """Which rows were chosen; None where all are."""
        if self._sample is not None:
            return f"a sample of {len(self)} of {self._total} rows (--sample-seed {self._seed})"
        return None if self._limit is None else f"the first {len(self)} of {self._total} rows"


def open_columns(path: str, only: str | None, key: str | None) -> RowFile:
    """The file `path`, of which the columns `only`, separated by commas, and `key` are used."""
    if only is None:
        return open_rows(path, None)
    wanted = {name.strip() for name in only.split(",")} | ({key} if key else set())
    return open_rows(path, frozenset(wanted))


def read_rows(rows: RowFile, program: Any, common: Sequence[str], key: str | None) -> Iterator[Any]:
    """The rows as arguments of `program`, except those in `common`, which are the same for all rows.

    Raises `InvalidRequest` where the first row has a column that the program does not take, or lacks a
    required one. A row that cannot be read is passed on as `Unreadable`, and becomes a row with an error.
    """
    found = rows.rows(program)
    first = next(found, None)
    if first is None:
        return iter(())
    if isinstance(first, Mapping):
        _check(first, program, set(common), key, rows.name)
    return itertools.chain([first], found)


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
