"""JSON schemas of Python types, narrowed to the values that pydantic accepts.

pydantic's own schemas allow more than pydantic accepts: any keys in ``dict[int, str]``, any scheme in a URL.
Without this, an output could satisfy its schema and still fail to parse.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

KEYS = {
    "integer": "^(0|-?[1-9][0-9]{0,17})$",
    "number": r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?$",
    "boolean": "^(true|false)$",
}
"""JSON type of a key → the pattern of its text."""

YEARS = "^([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""Years 1 to 9999. RFC 3339 has a year 0, Python has not."""

SHORT_NUMBERS = "^[^0-9]*([0-9]{1,6}[^0-9]+)*$"
"""Numbers of at most 6 digits: a timedelta has fewer than 10^9 days."""

DECIMAL_DIGITS = 18
"""Most digits before the point of a Decimal. pydantic reads it by way of a float, and refuses infinity."""

HOST = r"(localhost|([a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\.){1,4}[a-z]{2,10})"
"""No punycode and no IP addresses, as most texts of that form are invalid."""
PATH = "(:[1-9][0-9]{0,3})?([/?#][A-Za-z0-9/?#=&+._~-]{0,120})?"
LONGEST_URL = 300
"""Most characters of a text that matches `HOST` and `PATH`."""

UUIDS = {f"uuid{version}": f"^.{{14}}{version}.{{4}}[89abAB]" for version in range(1, 9)}
"""The digits of version and variant (RFC 9562, section 4)."""


class TypeSchema(GenerateJsonSchema):
    """Narrows the schemas that pydantic generates."""

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        found = super().dict_schema(schema)
        if "patternProperties" in found:
            found.setdefault("additionalProperties", False)
        elif "propertyNames" not in found and "keys_schema" in schema:
            pattern = KEYS.get(self.generate_inner(schema["keys_schema"]).get("type", ""))
            if pattern is not None:
                found["propertyNames"] = {"pattern": pattern}
        return found

    def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
        return _with_pattern(super().date_schema(schema), YEARS)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        return _with_pattern(super().datetime_schema(schema), YEARS)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Numbers alone: pydantic's schema has any text beside them."""
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
        return _with_pattern(super().timedelta_schema(schema), SHORT_NUMBERS)

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        schemes = "|".join(map(re.escape, schema.get("allowed_schemes") or ["https", "http"]))
        found = _with_pattern(super().url_schema(schema), f"^({schemes})://{HOST}{PATH}$")
        for keyword in ("format", "minLength"):
            del found[keyword]  # implied by the pattern
        if found.get("maxLength", 0) >= LONGEST_URL:
            del found["maxLength"]
        return found

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        found = super().generate_inner(schema)
        kind = found.get("format")
        if kind in UUIDS:
            return {**found, "format": "uuid", "pattern": UUIDS[kind]}
        if kind == "ipvanyaddress":
            return {"anyOf": [{**found, "format": "ipv4"}, {**found, "format": "ipv6"}]}
        return found


def _with_pattern(schema: JsonSchemaValue, pattern: str) -> JsonSchemaValue:
    return {**schema, "pattern": pattern} if schema.get("type") == "string" else schema
