"""The columns of a batch's results as Arrow arrays.

variable of                          column
str, Literal, Enum, regex, select    string
int, float, bool                     int64, double, bool
list[T]                              list of T's type
pydantic, dataclass, TypedDict       struct, a field for each of its fields
T | None                             T's type, null
dict[str, T], unions, Any            string: JSON text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import InvalidRequest
from ramify.lang.batch.table import common_type, fixed_types, stored_type, to_array
from ramify.lang.typed.adapters import modern

FIXED = ("row_id", "returned", "error", "usage")
"""Names of the columns that are added to those of the dataset and of the variables. A variable that has the
name of one of these, or of a column of the dataset, gets the column ``outputs.NAME``."""


class Columns:
    """A maker of tables of results. It remembers the types of columns, so that all tables of an actor agree.

    Args:
        declared: Variable → Python type or Arrow type. The column of any other variable gets the type of its
            values.
    """

    def __init__(self, declared: Mapping[str, Any]) -> None:
        import pyarrow as pa

        self._pa = pa
        self._declared = {name: arrow_type(kind) for name, kind in declared.items()}
        self._found: dict[str, Any] = {}
        """Column that was not declared → common type of its values so far; None if they are stored as JSON
        text."""
        self._types = {"row_id": pa.string(), **fixed_types(pa)}

    def table(self, rows: Any, ids: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> Any:
        """The Arrow table `rows` extended by the columns of the results.

        `lines`: the rows' lines of a results file.
        """
        given = set(rows.column_names)
        for name in FIXED:
            if name in given:
                raise InvalidRequest(
                    f"The dataset has a column {name!r}, which is a column of the results.",
                    field="dataset",
                    remedy=f'Rename it: dataset.rename_columns({{"{name}": …}}).',
                )
        columns: dict[str, list[Any]] = {
            "row_id": list(ids),
            "returned": [line["returned"] for line in lines],
            "error": [_texts(line["error"]) for line in lines],
            "usage": [line["usage"] for line in lines],
        }
        variables = dict.fromkeys([*self._declared, *(name for line in lines for name in line["outputs"])])
        for name in variables:
            column = f"outputs.{name}" if name in given or name in FIXED else name
            columns[column] = [line["outputs"].get(name) for line in lines]
        for name in self._found:  # columns of earlier batches
            columns.setdefault(name, [None] * len(lines))
        for name, values in columns.items():
            rows = rows.append_column(name, self._array(name, values))
        return rows

    def _array(self, name: str, values: list[Any]) -> Any:
        if name in self._types:
            return self._pa.array(values, self._types[name])
        variable = name.removeprefix("outputs.")
        if variable in self._declared:
            kind = self._declared[variable]
            try:
                return to_array(self._pa, values, stored_type(self._pa, kind), kind)
            except (self._pa.ArrowInvalid, self._pa.ArrowTypeError, OverflowError) as error:
                raise InvalidRequest(
                    f"A value of {variable!r} is not of the type in columns: {error}", field="columns"
                ) from None
        kind = common_type(self._pa, self._found.get(name, self._pa.null()), values)
        self._found[name] = kind
        return to_array(self._pa, values, stored_type(self._pa, kind), kind)


def _texts(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in error.items()}


def arrow_type(kind: Any) -> Any:
    """The Arrow type for `kind`: a Python type, a JSON schema, or an Arrow type, which is returned itself.

    None if values have to be stored as JSON text.
    """
    import pyarrow as pa
    from pydantic import PydanticUserError, TypeAdapter

    if isinstance(kind, pa.DataType):
        return kind
    try:
        schema = kind
        if not isinstance(kind, Mapping):
            schema = TypeAdapter(modern(kind)).json_schema(mode="serialization")
    except (PydanticUserError, RecursionError) as error:
        raise InvalidRequest(
            f"columns has {kind!r}, of which there is no JSON schema: {error}", field="columns"
        ) from None
    return _of_schema(pa, schema, schema.get("$defs", {}), ())


def _of_schema(pa: Any, schema: Mapping[str, Any], known: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """The Arrow type for a JSON schema in pydantic's form; None if values have to be stored as JSON text.

    `inside` names the definitions that are being followed, so that recursion is found.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return None if name in inside else _of_schema(pa, known[name], known, (*inside, name))
    if "anyOf" in schema:
        others = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return _of_schema(pa, others[0], known, inside) if len(others) == 1 else None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        types = [type(value) for value in values if value is not None]
        names = {str: "string", int: "integer", bool: "boolean", float: "number"}
        schema = {"type": names.get(types[0])} if len(set(types)) == 1 else {}
    plain = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
    if schema.get("type") == "array" and "items" in schema:
        inner = _of_schema(pa, schema["items"], known, inside)
        return None if inner is None else pa.list_(inner)
    if schema.get("type") == "object" and schema.get("properties") and not schema.get("additionalProperties"):
        fields = {name: _of_schema(pa, one, known, inside) for name, one in schema["properties"].items()}
        return None if None in fields.values() else pa.struct(list(fields.items()))
    kind = schema.get("type")
    return plain.get(kind) if isinstance(kind, str) else None
