"""The rows of `ramify run --input` as arguments of a program, read lazily."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.cli.inputs.row_files import Columns, RowFile, open_rows
from ramify.errors import InvalidRequest
from ramify.lang.batch.keys import Numbered, check_keys
from ramify.spelling import parameters_of


class InputRows:
    """The rows of the file `path`: all, or the first `limit` rows, or `sample` rows that are drawn with
    `seed`.

    The constructor raises the errors of `open_rows`, `read_rows` and `check_keys`.
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
        self._rows = open_rows(path, columns_of(program, common, only, key))
        self._check = program, common, key
        if key is not None:
            check_keys(self._chosen(self._rows.rows(program)), key)
        self._read()

    def _read(self) -> Iterator[Any]:
        return read_rows(self._rows, *self._check)

    @property
    def _total(self) -> int:
        return self._rows.count

    def __len__(self) -> int:
        return min([self._total, *(size for size in (self._limit, self._sample) if size is not None)])

    def __iter__(self) -> Iterator[Any]:
        return self._chosen(self._read())

    def _chosen(self, rows: Iterator[Any]) -> Iterator[Any]:
        if self._sample is None:
            return itertools.islice(rows, self._limit)
        chosen = set(random.Random(self._seed).sample(range(self._total), len(self)))
        return (Numbered(index, row) for index, row in enumerate(rows) if index in chosen)

    @property
    def again(self) -> str | None:
        """Text that says how to repeat the command if the rows came from a pipe; None for a file."""
        return (
            None
            if self._rows.copied is None
            else f"the same command, with the same rows in {self._rows.name}"
        )

    @property
    def note(self) -> str | None:
        """Text about the choice of rows by `limit` or `sample`, for the user; None if all rows are chosen."""
        if self._sample is not None:
            return f"a sample of {len(self)} of {self._total} rows (--sample-seed {self._seed})"
        return None if self._limit is None else f"the first {len(self)} of {self._total} rows"


def columns_of(program: Any, common: Sequence[str], only: str | None, key: str | None) -> Columns:
    """The `Columns` for `program`.

    `common`: parameters given on the command line. `only`: the names of the columns to pass, separated by
    commas; None for all.
    """
    return Columns(
        only=None if only is None else frozenset(name.strip() for name in only.split(",")),
        key=key,
        needed=frozenset(required(program)) - set(common),
        taken=None if _takes_any(program) else frozenset(keywords(program)),
    )


def read_rows(rows: RowFile, program: Any, common: Sequence[str], key: str | None) -> Iterator[Any]:
    """Yield the rows as arguments of `program`. `common` names the arguments that all rows share.

    Raises `InvalidRequest` if the first row has a column that the program does not take, or lacks a required
    argument. A row that cannot be read is passed on as an `Unreadable`, and its result is an error.
    """
    found = rows.rows(program)
    first = next(found, None)
    if first is None:
        return iter(())
    if isinstance(first, Mapping):
        _check(first, program, set(common), key, rows.name)
    return itertools.chain([first], found)


def _check(row: Mapping[str, Any], program: Any, common: set[str], key: str | None, path: str) -> None:
    taken = [name for name in row if name in keywords(program) or name == key]
    extra = [name for name in row if name not in taken]
    lacking = [name for name in required(program) if name not in row and name not in common]
    if extra and not _takes_any(program):
        passed = [name for name in taken if name != key or name in keywords(program)]
        raise InvalidRequest(
            f"The program has no parameter {extra[0]!r}, which is a column of {path}.",
            field="input",
            remedy=f"--columns {','.join(passed)} leaves the others out."
            if passed and not lacking
            else f"It has {', '.join(keywords(program)) or 'none'}.",
        )
    both = sorted(common & set(taken))
    if both:
        raise InvalidRequest(f"{both[0]} is given on the command line and is a column of {path}.")
    if lacking:
        raise InvalidRequest(
            f"The program needs {lacking[0]!r}; the columns read from {path} are {', '.join(row) or 'none'}.",
            field="input",
        )


def _takes_any(program: Any) -> bool:
    parameters = inspect.signature(program.body).parameters
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def keywords(program: Any) -> list[str]:
    """The names of the parameters of `program` that can be given by name."""
    return [name for name in parameters_of(program.body) if name in program.arg_names]


def required(program: Any) -> list[str]:
    """The names of those `keywords` of `program` that have no default."""
    parameters = inspect.signature(program.body).parameters
    return [name for name in keywords(program) if parameters[name].default is inspect.Parameter.empty]
