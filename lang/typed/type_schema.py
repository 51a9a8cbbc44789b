"""JSON schemas of Python types, narrowed to the values that pydantic accepts.

pydantic's own schemas allow more values than pydantic accepts: any keys for ``dict[int, str]``, any scheme
for a URL. An output could satisfy such a schema and still fail to parse. A type is refused if no schema can
describe what pydantic accepts, such as the path of a file that must exist.
"""

from __future__ import annotations

import datetime
import enum
import re
import zoneinfo
from collections.abc import Iterable
from typing import Any, NoReturn

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import SchemaValidator, core_schema, to_json

from ramify.errors import InvalidConstraint
from ramify.lang.typed.text_patterns import (
    BASE64,
    BASE64_TEXT,
    COMPLEX,
    FRACTION,
    INTERFACE,
    NAIVE_DATETIME,
    NETWORK,
    dates_between,
)

KEYS = {
    "integer": "^(0|-?[1-9][0-9]{0,17})$",
    "number": r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?$",
    "boolean": "^(true|false)$",
}

YEARS = "^([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""Pattern of texts that begin with a year from 1 to 9999. RFC 3339 has a year 0, which Python lacks."""

SHORT_NUMBERS = "^[^0-9]*([0-9]{1,6}[^0-9]+)*$"
"""Pattern of texts whose numbers have at most 6 digits, because a timedelta has fewer than 10^9 days."""

DECIMAL_DIGITS = 18
"""Most digits before the point of a Decimal. The digits are limited because pydantic converts the number to a
float first, and refuses infinity."""

_PLAIN_DECIMAL = {
    "allOf": [{"exclusiveMinimum": -(10.0**DECIMAL_DIGITS), "exclusiveMaximum": 10.0**DECIMAL_DIGITS}]
}
"""Bounds of a Decimal that has no bounds of its own. Numbers that match the patterns in `KEYS` are within
these bounds."""

_REMARKS = {"title", "description", "default", "examples", "deprecated"}

DAY = datetime.timedelta(days=1)
ZONES = 1
"""Most days by which the date in a text can differ from the date of the same moment in UTC."""

HOST = r"(localhost|([a-z0-9]{1,20}(-[a-z0-9]{1,10}){0,2}\.){1,4}[a-z]{2,10})"
"""Pattern of a host, without punycode, double dashes and IP addresses, because most such texts are
invalid."""
PORT = "(:[1-9][0-9]{0,3})?"
PATH = "([/?#][A-Za-z0-9/?#=&+._~-]{0,120})?"
LONGEST_URL = 300
"""Most characters of a text that matches `HOST`, `PORT` and `PATH`."""

UUIDS = {f"uuid{version}": f"^.{{14}}{version}.{{4}}[89abAB]" for version in range(1, 9)}
"""Format → pattern of UUIDs with the digits of this version and of the variant (RFC 9562, section 4)."""


SIZE = "^[0-9]{1,9}(\\.[0-9]{1,3})?(B|KB|MB|GB|TB|PB|EB|KiB|MiB|GiB|TiB|PiB|EiB)$"
"""Pattern of texts that pydantic reads as a ByteSize."""

_FORMATS: dict[str, JsonSchemaValue] = {
    "ipvanyaddress": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
    "ipv4network": {"type": "string", "pattern": NETWORK[4]},
    "ipv6network": {"type": "string", "pattern": NETWORK[6]},
    "ipvanynetwork": {"type": "string", "pattern": f"{NETWORK[4]}|{NETWORK[6]}"},
    "ipv4interface": {"type": "string", "pattern": INTERFACE[4]},
    "ipv6interface": {"type": "string", "pattern": INTERFACE[6]},
    "ipvanyinterface": {"type": "string", "pattern": f"{INTERFACE[4]}|{INTERFACE[6]}"},
}
"""pydantic's name of a format → schema of texts in this format."""

_EXISTING = "Use str or pathlib.Path, and look for the file in the program."
_REFUSED: dict[str, tuple[str, str]] = {
    "PathType.validate_file": ("A file has to exist", _EXISTING),
    "PathType.validate_directory": ("A folder has to exist", _EXISTING),
    "PathType.validate_new": ("A folder has to exist", _EXISTING),
    "import_string": ("A Python object has to be importable", "Use Literal with the names that you mean."),
    "ImportString._serialize": ("A Python object has to be importable", "Use Literal with the names."),
    "PaymentCardNumber.validate": ("A card number has check digits", "Use str with a pattern."),
    "pattern_bytes_validator": ("JSON has no bytes", "Use re.Pattern[str]."),
}
"""The function with which pydantic validates a type that has no exact schema → (reason for refusing the type,
remedy)."""


def _refuse(why: str, remedy: str) -> NoReturn:
    raise InvalidConstraint(
        f"{why}, so that a text of the schema may still be no value of the type.",
        field="schema",
        remedy=remedy,
    )


class TypeSchema(GenerateJsonSchema):
    """A generator of JSON schemas that narrows the schemas of pydantic's own generator. Raises
    `InvalidConstraint` for types whose values no schema describes."""

    def dict_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {})
        if keys.get("type") == "enum" and keys.get("sub_type") == "int":
            return found | {"propertyNames": {"enum": [str(member.value) for member in keys["members"]]}}
        if not keys:
            return found
        names = self._names(self.generate_inner(keys))
        if not names:
            _refuse(
                "A key of an object is a text", "Use str, int, float or bool for the keys, without bounds."
            )
        if "patternProperties" in found:
            found.setdefault("additionalProperties", False)
        elif all(name.keys() - {"type"} for name in names):
            found["propertyNames"] = names[0] if len(names) == 1 else {"anyOf": names}
        return found

    frozendict_schema = ordered_dict_schema = counter_schema = dict_schema

    def _names(self, schema: JsonSchemaValue) -> list[JsonSchemaValue]:
        """The schemas of the texts of an object's keys, for keys of a type whose own schema is `schema`.
        Empty if no schema of the texts is known."""
        schema = {key: value for key, value in self.resolved(schema).items() if key not in _REMARKS}
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return [name for option in options for name in self._names(option)]
        if "enum" in schema or "const" in schema:
            texts = [one for one in schema.get("enum", [schema.get("const")]) if isinstance(one, str)]
            return [{"enum": texts}] if texts else []
        parts = [schema, *schema.get("allOf", ())]
        if not schema or any(self.resolved(part).get("type") == "string" for part in parts):
            return [schema]
        bounds = {key: value for key, value in schema.items() if key != "type"}
        pattern = KEYS.get(str(schema.get("type")))
        return [{"pattern": pattern}] if pattern and bounds in ({}, _PLAIN_DECIMAL) else []

    def resolved(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """The definition that `schema` refers to; `schema` itself if it is no reference."""
        reference = schema.get("$ref")
        return schema if reference is None else self.get_schema_from_definitions(reference) or schema

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        _check_readable(schema, schema["expected"])
        return super().literal_schema(schema)

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        _check_readable(schema, schema["members"])
        return super().enum_schema(schema)

    def date_schema(self, schema: Any) -> JsonSchemaValue:
        lows = [schema[name].toordinal() + more for name, more in (("ge", 0), ("gt", 1)) if name in schema]
        highs = [schema[name].toordinal() - less for name, less in (("le", 0), ("lt", 1)) if name in schema]
        today = datetime.date.today().toordinal()  # in the local time zone, as pydantic has it
        if schema.get("now_op") == "future":
            lows.append(today + 2)  # an output may be validated on the next day
        elif schema.get("now_op") == "past":
            highs.append(today - 1)
        return _dates(super().date_schema(schema), lows, highs)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        """The schema of datetimes, restricted to dates on which every time in every time zone is within the
        bounds."""
        found = super().datetime_schema(schema)
        above = [schema[name] for name in ("ge", "gt") if name in schema]
        below = [schema[name] for name in ("le", "lt") if name in schema]
        margin = ZONES
        if schema.get("tz_constraint") == "naive":
            found = {"type": "string", "pattern": NAIVE_DATETIME}
            if "now_op" not in schema and not any(bound.tzinfo for bound in (*above, *below)):
                margin = 0
        now = datetime.datetime.now(datetime.UTC)
        if schema.get("now_op") == "future":
            above.append(now + DAY)  # an output may be validated a day later
        elif schema.get("now_op") == "past":
            below.append(now)
        lows = [1 + margin - (-_since_year_1(bound) // DAY) for bound in above]
        highs = [_since_year_1(bound) // DAY - margin for bound in below]
        if "gt" in schema:
            lows.append(2 + margin + _since_year_1(schema["gt"]) // DAY)
        return _dates(found, lows, highs, margin)

    def time_schema(self, schema: core_schema.TimeSchema) -> JsonSchemaValue:
        if _BOUNDS & schema.keys():
            _refuse("A time of day has bounds", "Leave the bounds out, and check them in the program.")
        return super().time_schema(schema)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """The schema of a Decimal as a JSON number. pydantic's own schema also allows any text."""
        found = dict(super().decimal_schema(schema)["anyOf"][0])
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is not None or places is not None:
            places = digits // 2 if places is None and digits is not None else places or 0
            step = {"multipleOf": float(f"1e-{places}")}
            found = {"allOf": [found, step]} if "multipleOf" in found else found | step
        most = 10.0 ** min(DECIMAL_DIGITS, DECIMAL_DIGITS if digits is None else digits - (places or 0))
        bounds = {"exclusiveMinimum": -most, "exclusiveMaximum": most}
        return {**found, "allOf": [*found.get("allOf", ()), bounds]}

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        if _BOUNDS & schema.keys():
            _refuse("A duration has bounds", "Use a number of seconds with the same bounds.")
        return _with_pattern(super().timedelta_schema(schema), SHORT_NUMBERS)

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        return _url(super().url_schema(schema), schema.get("allowed_schemes"))

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        return _url(super().multi_host_url_schema(schema), schema.get("allowed_schemes"))

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        return {**super().complex_schema(schema), "pattern": COMPLEX}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """The schema of bytes as text. If the type limits the length, only ASCII text is allowed, because the
        limit counts bytes."""
        if self._config.val_json_bytes != "utf8":
            _refuse("Bytes have an encoding of their own", "Leave val_json_bytes out of the configuration.")
        found = super().bytes_schema(schema)
        limited = {"min_length", "max_length"} & schema.keys()
        return {**found, "pattern": r"^[\x00-\x7f]*$"} if limited else found

    def json_schema(self, schema: core_schema.JsonSchema) -> JsonSchemaValue:
        _refuse("The text of a JSON string has to be JSON itself", "Use the type inside of Json[…].")

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        _refuse("JSON has no classes", "Use Literal with the names that you mean.")

    def chain_schema(self, schema: core_schema.ChainSchema) -> JsonSchemaValue:
        if any(step["type"] == "is-instance" for step in schema["steps"]):
            _refuse("A value has to be of a class", "Use the types of JSON that you mean.")
        return super().chain_schema(schema)

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        function = schema.get("function")
        if isinstance(function, dict):
            name = getattr(function.get("function"), "__qualname__", "")
            module = getattr(function.get("function"), "__module__", None) or ""
            if name in _REFUSED and module.startswith("pydantic"):
                _refuse(*_REFUSED[name])
        found = super().generate_inner(schema)
        kind = found.get("format")
        if kind in UUIDS:
            return {**found, "format": "uuid", "pattern": UUIDS[kind]}
        if kind in _FORMATS:
            return _FORMATS[kind]
        if kind in BASE64:
            text = schema.get("type") == "function-after" and "decode_str" in repr(schema["function"])
            return {"type": "string", "pattern": (BASE64_TEXT if text else BASE64)[kind]}
        if any(option.get("format") == "fraction" for option in found.get("anyOf", ())):
            return {"type": "string", "pattern": FRACTION}
        if kind == "zoneinfo":
            return {"enum": sorted(zoneinfo.available_timezones())}
        if str(found.get("pattern")).startswith(r"^\s*(\d*\.?\d+)\s*(\w+)"):
            return {"type": "string", "pattern": SIZE}
        return found


_BOUNDS = {"ge", "gt", "le", "lt"}


def _since_year_1(moment: datetime.datetime) -> datetime.timedelta:
    """The time in UTC from the beginning of year 1 to `moment`, which may be negative because of the moment's
    UTC offset."""
    return moment.replace(tzinfo=None) - datetime.datetime.min - (moment.utcoffset() or datetime.timedelta(0))


def _dates(found: JsonSchemaValue, lows: list[int], highs: list[int], margin: int = 0) -> JsonSchemaValue:
    """The schema `found`, of texts that begin with a date, restricted to dates from the latest of `lows` to
    the earliest of `highs`. `lows` and `highs` are ordinals of dates, and include `margin`, which here only
    changes the error message."""
    first, last = datetime.date.min.toordinal(), datetime.date.max.toordinal()
    low, high = max([first, *lows]), min([last, *highs])
    if low > high:
        zones = ", with a margin of one day at each for time zones" if margin else ""
        _refuse(f"No whole day lies between the bounds{zones}", "Widen them by a day or more.")
    if (low, high) == (first, last):
        return found if "pattern" in found else _with_pattern(found, YEARS)
    between = dates_between(datetime.date.fromordinal(low), datetime.date.fromordinal(high))
    return {"allOf": [found, {"type": "string", "pattern": between}]}


def _check_readable(schema: core_schema.CoreSchema, values: Iterable[Any]) -> None:
    validator = SchemaValidator(schema)
    for value in values:
        raw = value.value if isinstance(value, enum.Enum) else value
        try:
            validator.validate_json(to_json(raw))
        except ValueError:  # of both
            _refuse(f"The value {raw!r} is not read from JSON", "Use texts, numbers, booleans and None.")


def _url(schema: JsonSchemaValue, schemes: list[str] | None) -> JsonSchemaValue:
    schemes = schemes or ["https", "http"]
    port = "" if "file" in schemes else PORT
    found = _with_pattern(schema, f"^({'|'.join(map(re.escape, schemes))})://{HOST}{port}{PATH}$")
    for keyword in ("format", "minLength"):
        del found[keyword]  # implied by the pattern
    if found.get("maxLength", 0) >= LONGEST_URL:
        del found["maxLength"]
    return found


def _with_pattern(schema: JsonSchemaValue, pattern: str) -> JsonSchemaValue:
    return {**schema, "pattern": pattern} if schema.get("type") == "string" else schema
