"""Reading a JSON body field by field.

Each field is taken once, with its type. Fields that were not taken are refused by name, so that no option is
silently ignored. Every error names its field.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.tables.rows import FieldTable
from ramify.spelling import nearest
from ramify.text import shortened

MAX_OBJECTS = 10_000
"""Maximum number of objects in a list, such as messages. The event loop takes about 10 us for each."""

_NOTHING: tuple[Any, ...] = (None, [], {}, "")

Ignored = Mapping[str, Sequence[Any] | None]
"""Field that has no effect on the answer → its allowed values, or None if any is allowed."""

T = TypeVar("T", bound=msgspec.Struct)


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


L = TypeVar("L", bound=_HasId)


@dataclasses.dataclass(slots=True, kw_only=True)
class BodyState:
    """State that the objects of one body share."""

    strict: bool = False
    """Whether fields without an effect are refused (``--strict-fields``)."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The headers of the request, by names in lower case."""
    left_out: Set[str] = frozenset()
    """Full names of fields and items that count as not given: see `parsing.parse_body`."""
    ignored: dict[str, None] = dataclasses.field(default_factory=dict)
    """Keys: see `Fields.ignored`."""


class Fields:
    """The fields of one JSON object. A field that is null counts as not given."""

    def __init__(self, values: dict[str, msgspec.Raw], path: str = "", body: BodyState | None = None) -> None:
        self._path = path
        self.body = BodyState() if body is None else body
        """State that the objects of one body share."""
        left_out = self.body.left_out
        self._values = (
            {name: raw for name, raw in values.items() if self.path(name) not in left_out}
            if left_out
            else values
        )
        self.taken: set[str] = set()
        """Names of the fields that were taken, whether given or not."""

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        """The fields of the JSON object in `body`. Raises `InvalidRequest` if `body` is no JSON object."""
        return cls(decode(body, dict[str, msgspec.Raw], ""))

    @property
    def ignored(self) -> list[str]:
        """Full names of given fields without an effect, in the whole body, such as ``messages[].name``."""
        return list(self.body.ignored)

    def path(self, field: str) -> str:
        """The full name of `field` in errors, such as ``messages[0].role``."""
        return f"{self._path}.{field}" if self._path else field

    def given(self, field: str) -> bool:
        """True if the client sent `field`, and not as null."""
        return field in self._values and not self.is_null(field)

    def is_null(self, field: str) -> bool:
        """True if the client sent `field` as null."""
        raw = self._values.get(field)
        return raw is not None and _is_null(raw)

    def mentions(self, field: str, name: str) -> bool:
        """True if `name` occurs as a string anywhere in the JSON of `field`."""
        return f'"{name}"'.encode() in bytes(self._values.get(field, b""))

    def take(self, field: str, kind: Any, default: Any = None) -> Any:
        """The value of `field` as `kind` (any type that msgspec decodes); `default` if not given."""
        self.taken.add(field)
        raw = self._values.get(field)
        return default if raw is None or _is_null(raw) else decode(raw, kind, self.path(field))

    def need(self, field: str, kind: Any = str) -> Any:
        """The value of `field` as `kind`. Raises `InvalidRequest` if it is missing or empty."""
        value = self.take(field, kind)
        if value in (None, "", ()):
            what = "missing" if value is None else "empty"
            raise InvalidRequest(f"{self.path(field)} is {what}.", field=self.path(field))
        return value

    def take_text(self, field: str) -> str | None:
        """The JSON text of `field` as the client wrote it, with its key order and numbers; None if not
        given."""
        raw = self.take(field, msgspec.Raw)
        if raw is None:
            return None
        decode(raw, Any, self.path(field))
        return bytes(raw).decode()

    def take_json(self, field: str) -> str | None:
        """The JSON text of `field`, or the JSON text in `field` if that is a string; None if not given."""
        text = self.take_text(field)
        return msgspec.json.decode(text, type=str) if text and text.lstrip().startswith('"') else text

    def take_struct(self, field: str, kind: type[T]) -> T | None:
        """The object in `field` as a `kind`; None if not given. This refuses unknown fields, `take` does
        not."""
        inner = self.take_object(field)
        return None if inner is None else inner.as_struct(kind)

    def as_struct(self, kind: type[T]) -> T:
        """The remaining fields as a `kind`. Unknown fields are refused by name."""
        values: dict[str, Any] = {}
        for entry in msgspec.structs.fields(kind):
            take = self.need if entry.required else self.take
            if (value := take(entry.name, entry.type)) is not None:
                values[entry.name] = value
        self.refuse_rest()
        return kind(**values)

    def take_object(self, field: str) -> Fields | None:
        """The fields of the object in `field`; None if not given."""
        values = self.take(field, dict[str, msgspec.Raw])
        return None if values is None else Fields(values, self.path(field), self.body)

    def take_objects(self, field: str) -> list[Fields] | None:
        """The fields of each object in the list in `field`; None if not given. Raises `InvalidRequest` for
        more than `MAX_OBJECTS`."""
        items = self.take(field, list[dict[str, msgspec.Raw]])
        if items is None:
            return None
        if len(items) > MAX_OBJECTS:
            path = self.path(field)
            raise InvalidRequest(
                f"{path} has {len(items)} objects; at most {MAX_OBJECTS} are taken.",
                field=path,
                remedy="Send fewer in one request.",
            )
        return [
            Fields(values, path, self.body)
            for index, values in enumerate(items)
            if (path := f"{self.path(field)}[{index}]") not in self.body.left_out
        ]

    def ignore(self, fields: Ignored, remedy: str = "Leave it out.") -> None:
        """Take fields that have no effect. `ignored` gets the names of the given ones.

        `fields` maps each field to its allowed values, or to None if any value is allowed. Another value
        raises `UnsupportedField`, with `remedy`. With ``--strict-fields`` every given field does.
        """
        for field, allowed in fields.items():
            value = self.take(field, Any)
            if allowed is not None and value is not False and value not in (*_NOTHING, *allowed):
                path, given = self.path(field), shortened(repr(value), 100)
                raise UnsupportedField(
                    f"{path} is {given}; only {' and '.join(map(repr, allowed))} is supported.",
                    field=path,
                    remedy=remedy,
                )
            if value not in _NOTHING:
                self.leave_out(re.sub(r"\[\d+\]", "[]", self.path(field)), self.path(field))

    def leave_out(self, name: str, path: str | None = None) -> None:
        """Note that the part of the body at `path` has no effect (None: this object). `ignored` gets its
        `name`. With ``--strict-fields`` it is refused."""
        if self.body.strict:
            path = self._path if path is None else path
            raise UnsupportedField(
                f"{path} has no effect on this server.",
                field=path,
                remedy="Leave it out, or start the server without --strict-fields.",
            )
        self.body.ignored[name] = None

    def finish(self, table: FieldTable) -> None:
        """Ignore and refuse by `table` the fields that were not taken. Unknown fields are refused by name."""
        for name in self._values:
            if name in table.ignored and name not in self.taken:
                row = table.ignored[name]
                self.ignore({name: row.allowed}, row.remedy)
        self.refuse_rest(table.refused)

    def refuse_rest(self, unsupported: Mapping[str, str] | None = None) -> None:
        """Raise `UnsupportedField` for the first field that was not taken. Fields whose names begin with an
        underscore are ignored.

        `unsupported` maps fields of other servers to a remedy or "". Such a field is accepted if its value
        asks for nothing: null, false or empty.
        """
        unsupported = unsupported or {}
        for field, raw in self._values.items():
            if field in self.taken:
                continue
            path = self.path(field)
            if field.startswith("_"):  # private to the client: no API has such a field
                self.ignore({field: None})
                continue
            if field in unsupported:
                if decode(raw, Any, path) in (*_NOTHING, False):
                    continue
                raise UnsupportedField(
                    f"{path} is not supported.", field=path, remedy=unsupported[field] or None
                )
            raise UnsupportedField(
                f"{path} is not a field of this request.",
                field=path,
                remedy=nearest(field, [*self.taken, *unsupported]),
            )


def _is_null(raw: msgspec.Raw) -> bool:
    return memoryview(raw)[0] == ord("n")  # nothing else begins so in JSON


def decode(data: bytes | msgspec.Raw, kind: Any, path: str) -> Any:
    """Decode `data` as `kind`. Raises `InvalidRequest`. `path` is the place of `data` in the body ("" for the
    whole body)."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        path += place.partition("$")[2].rstrip("`")
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    except RecursionError:
        problem = "it is nested too deeply"
    except (msgspec.DecodeError, ValueError) as error:
        problem = "it is truncated JSON" if str(error) == "Input data was truncated" else str(error)
        if not path and not bytes(memoryview(data)[:64]).strip():
            problem = "it is empty; send a JSON object"
        elif "truncated" in problem and _ends(data):  # msgspec also says this of an unpaired surrogate
            problem = r"it has a half of a surrogate pair (\ud800 to \udfff), which is no character"
    if not problem[:2].isupper():  # keeps "JSON is malformed"
        problem = problem[:1].lower() + problem[1:]
    raise InvalidRequest(f"{path or 'The body'}: {shortened(problem, 300)}.", field=path or None)


def _ends(data: bytes | msgspec.Raw) -> bool:
    """Whether Python's JSON parser, which accepts unpaired surrogates, finds `data` complete."""
    try:
        json.loads(bytes(memoryview(data)))
    except (ValueError, RecursionError):
        return False
    return True


def page_limit(given: str | None, default: int, most: int) -> int:
    """The parameter ``limit`` of a query, from 1 to `most`; `default` if not given."""
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise InvalidRequest(
            f"limit is {shortened(repr(given), 100)}; it must be between 1 and {most}.", field="limit"
        )
    return int(given[:9])


def page_of(entries: Sequence[L], show: Callable[[L], Any], after: str | None, limit: int) -> dict[str, Any]:
    """The list, in OpenAI's form, of `limit` entries behind the one with the id `after`. `show` makes the
    JSON of an entry."""
    start = 0
    if after:
        found = [place for place, entry in enumerate(entries) if entry.id == after]
        if not found:
            raise InvalidRequest(f"after: there is no {shortened(repr(after), 100)}.", field="after")
        start = found[0] + 1
    shown = entries[start : start + limit]
    return {
        "object": "list",
        "data": [show(entry) for entry in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(entries) > start + limit,
    }


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> Response:
    """`body` (anything that msgspec encodes) as JSON."""
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")
