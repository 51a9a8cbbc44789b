"""A Parquet table with typed columns, made from a batch's results file.

Each variable in ``outputs`` becomes a column; ``index``, ``header``, ``key``, ``returned``, ``error`` and
``usage`` are columns as well. The column of a variable with one of these names is ``outputs.NAME``. Numbers,
booleans, texts, lists and objects keep their types. A column whose values do not agree on one type holds each
value as JSON text.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest
from ramify.lang.batch.checkpoint import rows_of
from ramify.lang.batch.json_text import NON_FINITE

FIXED = ("index", "header", "key", "returned", "error", "usage")
ROWS = 1024
"""Number of rows that are held in memory at a time."""


def check_table(path: Path) -> None:
    """Raise `InvalidRequest` if pyarrow, which writes the table at `path`, is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise InvalidRequest(
            f"{path} needs pyarrow, which is not installed.",
            field="out",
            remedy='pip install "ramify-llm[parquet]", or name a .jsonl file.',
        ) from None


def write_table(results: Path, path: Path) -> None:
    """Write the results in the file `results` as a table to `path`, which is replaced atomically."""
    import pyarrow as pa
    from pyarrow import parquet

    declared, types = fixed_types(pa), dict[str, Any]()
    for rows in _batches(results):
        for name, values in _columns(rows).items():
            known = types.get(name, declared.get(name, pa.null()))
            types[name] = common_type(pa, known, values)
    schema = pa.schema([(name, stored_type(pa, kind)) for name, kind in types.items()])
    new_path = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with parquet.ParquetWriter(new_path, schema) as writer:
            for rows in _batches(results):
                columns = _columns(rows)
                arrays = [
                    to_array(pa, columns.get(field.name, [None] * len(rows)), field.type, types[field.name])
                    for field in schema
                ]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        os.replace(new_path, path)
    finally:
        new_path.unlink(missing_ok=True)


def fixed_types(pa: Any) -> dict[str, Any]:
    """Types of the columns that have the same type in all tables, whether rows have failed or not."""
    texts = ("type", "message", "variable", "line", "traceback", "partial")
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens")
    return {
        "error": pa.struct({**dict.fromkeys(texts, pa.string()), "transient": pa.bool_()}),
        "usage": pa.struct({**dict.fromkeys(counts, pa.int64()), "duration_s": pa.float64()}),
    }


def _batches(results: Path) -> Iterator[list[dict[str, Any]]]:
    rows = rows_of(results)
    while batch := list(itertools.islice(rows, ROWS)):
        yield [_flat(row) for row in batch]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: row.get(name) for name in FIXED if name != "key" or name in row}
    for name, value in row["outputs"].items():
        flat[f"outputs.{name}" if name in FIXED else name] = value
    return flat


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def common_type(pa: Any, known: Any, values: list[Any]) -> Any:
    """Common type of `known`, the type of a column's earlier values, and of `values`; None if there is no
    common type."""
    if known is None:
        return None
    values = _with_numbers(pa, values, known)
    try:
        found = pa.array(values).type
        merged = pa.unify_schemas(
            [pa.schema([("value", known)]), pa.schema([("value", found)])], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None
    return merged.field("value").type


def stored_type(pa: Any, kind: Any) -> Any:
    """Type in which a column of type `kind` is stored: text if `kind` is None or a type that Parquet
    lacks."""
    return pa.string() if kind is None or not _can_be_stored(pa, kind) else kind


def _can_be_stored(pa: Any, kind: Any) -> bool:
    """Whether Parquet has the type `kind`. Parquet has no structs without fields."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_can_be_stored(pa, field.type) for field in kind)
    return not pa.types.is_list(kind) or _can_be_stored(pa, kind.value_type)


def to_array(pa: Any, values: list[Any], stored: Any, kind: Any) -> Any:
    """The array of `values` with the type `stored`. `kind` is the values' own type. If `stored` is another
    type, each value is written as JSON text."""
    if stored != kind:
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    else:
        values = [_floats(pa, value, stored) for value in values]
    return pa.array(values, stored)


def _with_numbers(pa: Any, values: list[Any], known: Any) -> list[Any]:
    """`values`, with texts of NaN and infinities converted to floats, if the column has numbers and `values`
    has no other texts."""
    texts = {value for value in values if isinstance(value, str)}
    numbers = pa.types.is_floating(known) or pa.types.is_integer(known)
    numbers |= any(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not texts or not numbers or not texts <= NON_FINITE.keys():
        return values
    return [_floats(pa, value, pa.float64()) for value in values]


def _floats(pa: Any, value: Any, kind: Any) -> Any:
    """`value`, of type `kind`, with texts of NaN and infinities converted to floats where `kind` has
    floats."""
    if isinstance(value, str) and pa.types.is_floating(kind):
        return NON_FINITE.get(value, value)
    if isinstance(value, list) and pa.types.is_list(kind):
        return [_floats(pa, one, kind.value_type) for one in value]
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return value | {
            field.name: _floats(pa, value[field.name], field.type) for field in kind if field.name in value
        }
    return value
