"""Check that a document is a JSON Schema: the types of keywords, and the targets of references.

The check supports draft 2020-12 and older drafts back to draft-04. Keywords that no draft defines are
annotations, as the specification says. The meaning of keywords is not considered here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import unquote

from ramify.errors import InvalidConstraint
from ramify.json_text import escape
from ramify.schema_bundle import remedy, resolved
from ramify.spelling import nearest

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_DEPTH = 200
ANY_DRAFT = 10
"""The draft number of a schema without ``$schema``, in which the keywords of all drafts count."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
MAX_KEYWORD_DIGITS = 400
"""Most digits before the point, or zeros directly after it, in a number that is a keyword's value (such as
minimum or multipleOf). Numbers in const and enum may have more (`json_values.MAX_DIGITS`)."""


class SchemaDocument:
    """A checked schema, whose subschemas are named by their JSON pointer (RFC 6901) from the root.

    `root` must be as `json_values.parse_json` returns it: numbers are integers and `Decimal`, never floats.
    Raises `InvalidConstraint` with the pointer of the first error.

    The target of a ``$dynamicRef`` depends on the *dynamic scope*: the schema resources (those with an
    ``$id``) that were entered on the way (2020-12 Core, section 7.1). If the dynamic scope matters, the name
    of a subschema begins with "#" and the number of its scope, as in "#2/$defs/item/items". `entered` returns
    such names, and `place` removes the number. All other methods take and return names with or without a
    number.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._drafts = {"": _draft(root)}
        self.unread: dict[str, str] = {}
        """Keywords, by pointer, that are newer than the draft and therefore have no effect."""
        self.subschemas: dict[str, Schema] = {}
        """All subschemas by their pointer."""
        self._bases: dict[str, str] = {}
        self._resources: dict[str, str] = {"": ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic_anchors: dict[str, dict[str, str]] = {}
        self._scopes: list[tuple[str, ...]] = [()]
        self._first_by_content: dict[Any, str] = {}
        self._canonical: dict[str, str] = {}
        self._check(root, "", 0, "")
        self._check_references()

    def at(self, pointer: str) -> Schema:
        """The subschema at `pointer`."""
        return self.subschemas[place(pointer)]

    def draft(self, pointer: str) -> int:
        """The draft by which the subschema is read: that of the schema resource that contains it."""
        return self._drafts[self._bases.get(place(pointer), "")]

    def entered(self, pointer: str) -> str:
        """The name of the subschema at `pointer` with the number of the dynamic scope inside the subschema.
        The scope includes the subschema's own resource. Only resources that share the name of a dynamic
        anchor with another resource belong to the scope. If the scope does not change, the result is
        `pointer` itself."""
        if not self._tracked:
            return pointer
        here = place(pointer)
        resource = self._bases.get(here, "")
        scope = self._scope(pointer)
        if resource in self._tracked and resource not in scope:
            scope = (*scope, resource)
            if scope not in self._scopes:
                self._scopes.append(scope)
            return f"#{self._scopes.index(scope)}{here}"
        return pointer

    @cached_property
    def _tracked(self) -> frozenset[str]:
        several = (anchors for anchors in self._dynamic_anchors.values() if len(anchors) > 1)
        return frozenset(resource for anchors in several for resource in anchors)

    def _scope(self, pointer: str) -> tuple[str, ...]:
        """The resources of the dynamic scope in `pointer`, the outermost first."""
        number = pointer.partition("/")[0]
        return self._scopes[int(number[1:])] if number else ()

    def keywords(self, pointer: str) -> dict[str, Any]:
        """The keywords of a subschema, which must not be a boolean. Up to draft-07 a ``$ref`` overrides all
        other keywords."""
        schema = self.at(pointer)
        assert isinstance(schema, dict)
        if "$ref" in schema and self.draft(pointer) <= 7:
            return {"$ref": schema["$ref"]}
        newer = _newer(schema, self.draft(pointer))
        return {name: value for name, value in schema.items() if name not in newer} if newer else schema

    def canonical(self, pointer: str) -> str:
        """The pointer of the first subschema that is equal to the one at `pointer`, so that equal subschemas
        share one formula."""
        here = place(pointer)
        return pointer.removesuffix(here) + self._canonical.get(here, here)

    def target(self, pointer: str, keyword: str = "$ref") -> str:
        """The pointer of the subschema that the reference `keyword` at `pointer` leads to.

        Raises `InvalidConstraint` if the reference leads out of the document, or if its target does not
        exist.
        """
        here = place(pointer)
        found = self._found(here, keyword)
        name = self._dynamic_name(here, keyword, found)
        if name is not None:
            anchors = self._dynamic_anchors[name]
            found = next((anchors[each] for each in self._scope(pointer) if each in anchors), found)
        return pointer.removesuffix(here) + found

    def _dynamic_name(self, pointer: str, keyword: str, found: str) -> str | None:
        """The name of the dynamic anchor at `found`, if the reference must be resolved in the dynamic scope;
        else None.

        For a ``$recursiveRef``, the name is "": all resources with ``$recursiveAnchor: true`` define an
        anchor of this name.
        """
        schema = self.at(pointer)
        if keyword == "$ref" or not isinstance(schema, dict):
            return None
        name: str = schema[keyword].partition("#")[2]
        if (name == "") != (keyword == "$recursiveRef"):
            return None
        return name if found in self._dynamic_anchors.get(name, {}).values() else None

    def _found(self, pointer: str, keyword: str) -> str:
        """The pointer of the subschema that a reference leads to if the dynamic scope is ignored."""
        schema = self.subschemas[pointer]
        assert isinstance(schema, dict)
        reference: str = schema[keyword]
        where = f"{pointer}/{keyword}"
        named, _, fragment = reference.partition("#")
        base = self._bases[pointer]
        resource = resolved(base, named, where) if named else base
        if resource not in self._resources:
            raise InvalidConstraint(
                f"The {keyword} {reference!r} leads out of the schema, to {resource}.",
                pointer=where,
                remedy=remedy(resource, named),
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (resource, fragment) not in self._anchors:
                _refuse(where, f"The {keyword} {reference!r} leads nowhere: there is no such $anchor")
            found = self._anchors[resource, fragment]
        else:
            found = self._resources[resource] + fragment
        if found not in self.subschemas:
            # The target may be a place where no keyword has a subschema, such as "#/components/x".
            self._check(self._find(found, where, reference), found, found.count("/"), resource)
        return found

    def _check_references(self) -> None:
        queue = list(self.subschemas)
        for pointer in queue:
            schema = self.subschemas[pointer]
            known = len(self.subschemas)
            for keyword in REFERENCES:
                if isinstance(schema, dict) and keyword in schema:
                    self.target(pointer, keyword)
            queue += list(self.subschemas)[known:]  # found at the targets of references

    def _find(self, pointer: str, where: str, reference: str) -> Any:
        here = self.root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and name in here:
                here = here[name]
            elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
                here = here[int(name)]
            else:
                raise InvalidConstraint(
                    f"The reference {reference!r} leads nowhere.",
                    pointer=where,
                    remedy=self._nearest_definition(reference),
                )
        return here

    def _nearest_definition(self, reference: str) -> str | None:
        known = [
            f"#/{keyword}/{escape(name)}"
            for keyword in ("$defs", "definitions")
            if isinstance(self.root, dict)
            for name in self.root.get(keyword, ())
        ]
        _, _, name = reference.rpartition("/")
        same = [one for one in known if one.endswith(f"/{name}")]
        return f"Did you mean {same[0]}?" if same else nearest(reference, known)

    def _check(self, schema: Any, pointer: str, depth: int, base: str) -> Any:
        """Check a subschema and all subschemas below it.

        Returns a key that is the same for equal subschemas: the pointer of the first of them, or the boolean
        itself.
        """
        if not isinstance(schema, dict | bool):
            _refuse(pointer, f"A schema is an object or a boolean, not {_kind(schema)}")
        if depth > MAX_DEPTH:
            _refuse(pointer, f"The schema is nested more than {MAX_DEPTH} deep", "Use $ref for inner parts.")
        self.subschemas[pointer] = schema
        if isinstance(schema, bool):
            return schema
        base = self._enter(schema, pointer, base)
        self._bases[pointer] = base
        content: list[Any] = [base]
        newer = _newer(schema, self._drafts[base])
        for keyword, value in schema.items():
            where = f"{pointer}/{escape(keyword)}"
            if keyword in newer:
                self.unread[where] = keyword
                continue
            check = _VALUES.get(keyword)
            if check is not None and not self._is_older_form(keyword, value, base):
                check(where, keyword, value)
            if keyword in _TEXTS:
                _check_characters(where, keyword, list(value) if keyword in _SCHEMA_MAPS else value)
            keys = [
                (below, self._check(child, where + below, depth + 1, base))
                for below, child in _children(keyword, value)
            ]
            if keyword in KEYWORDS:
                content.append((keyword, tuple(keys) if keys and keyword != "dependencies" else repr(value)))
        first = self._first_by_content.setdefault(tuple(content), pointer)
        self._canonical[pointer] = first
        return first

    def _is_older_form(self, keyword: str, value: Any, base: str) -> bool:
        """Whether `value` is a boolean exclusiveMinimum or exclusiveMaximum, which in draft-04 and OpenAPI
        3.0 makes minimum or maximum exclusive."""
        return (
            keyword in ("exclusiveMinimum", "exclusiveMaximum")
            and isinstance(value, bool)
            and self._drafts[base] in (4, ANY_DRAFT)
        )

    def _enter(self, schema: dict[str, Any], pointer: str, base: str) -> str:
        """Record the URI and anchors of a subschema. Returns the base URI inside it.

        A subschema that has a URI may also have a ``$schema`` of its own (2020-12 Core, section 8.1.1).
        """
        draft = self._drafts[base]
        own = isinstance(schema.get("$schema"), str) and {"$id", "id"} & schema.keys()
        if own and pointer:
            draft = _draft(schema, pointer)
        keyword = "id" if draft == 4 else "$id"
        identifier = schema.get(keyword)
        if isinstance(identifier, str) and (own or not (draft <= 7 and "$ref" in schema)):
            named, _, fragment = identifier.partition("#")
            if named:
                base = resolved(base, named, f"{pointer}/{keyword}")
                self._resources.setdefault(base, pointer)
                self._drafts.setdefault(base, draft)
                if not pointer:
                    self._resources[""] = ""
            if fragment:
                self._anchors[base, fragment] = pointer
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[base, schema[keyword]] = pointer
                if keyword == "$dynamicAnchor":
                    self._dynamic_anchors.setdefault(schema[keyword], {})[base] = pointer
        if schema.get("$recursiveAnchor") is True and self._resources.get(base) == pointer:
            self._dynamic_anchors.setdefault("", {})[base] = pointer
        return base


def place(pointer: str) -> str:
    """The JSON pointer in a name that `SchemaDocument.entered` returned: "/items" for "#2/items"."""
    return pointer if pointer[:1] != "#" else pointer[len(pointer.partition("/")[0]) :]


def _draft(schema: Any, pointer: str = "") -> int:
    """The number of the draft that ``$schema`` names: 8 for 2019-09, 9 for 2020-12 and later; ANY_DRAFT if it
    names none."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(name, str):
        for draft in (4, 6, 7):
            if f"draft-0{draft}" in name:
                return draft
        if "draft-03" in name:
            raise InvalidConstraint(
                "Draft-03 is not supported.", pointer=f"{pointer}/$schema", remedy="Use draft 2020-12."
            )
        if "2019-09" in name:
            return 8
        if "json-schema.org" in name:
            return 9
    return ANY_DRAFT


def _children(keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The subschemas in a keyword's value, each with its pointer relative to the keyword."""
    if (
        keyword in _ONE_SCHEMA
        or keyword in _UNEVALUATED
        or (keyword == "items" and not isinstance(value, list))
    ):
        yield "", value
    elif keyword in _SCHEMA_LISTS or keyword == "items":
        for i, child in enumerate(value):
            yield f"/{i}", child
    elif keyword in _SCHEMA_MAPS:
        for name, child in value.items():
            yield f"/{escape(name)}", child
    elif keyword == "dependencies":
        for name, child in value.items():
            if not isinstance(child, list):
                yield f"/{escape(name)}", child


_ASSERTING = """
type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern
format maxItems minItems uniqueItems items prefixItems additionalItems contains maxContains minContains
maxProperties minProperties required properties patternProperties additionalProperties propertyNames
dependencies dependentRequired dependentSchemas allOf anyOf oneOf not if then else
unevaluatedProperties unevaluatedItems nullable
"""
KEYWORDS = frozenset([*_ASSERTING.split(), *REFERENCES])
"""Assertions and applicators, the keywords that decide which values are valid."""

_SINCE = {
    **dict.fromkeys(["const", "contains", "propertyNames"], 6),
    **dict.fromkeys(["if", "then", "else"], 7),
    **dict.fromkeys(["dependentRequired", "dependentSchemas", "minContains", "maxContains"], 8),
    **dict.fromkeys(["unevaluatedProperties", "unevaluatedItems", "$recursiveRef"], 8),
    **dict.fromkeys(["prefixItems", "$dynamicRef"], 9),
}
"""The draft that introduced each keyword that is newer than draft-04."""


def _newer(schema: dict[str, Any], draft: int) -> set[str]:
    """The keywords of a subschema that are newer than its draft and therefore have no effect."""
    return {name for name in _SINCE.keys() & schema.keys() if _SINCE[name] > draft}


_ONE_SCHEMA = frozenset(
    ["additionalProperties", "additionalItems", "propertyNames", "contains", "not", "if", "then", "else"]
)
_UNEVALUATED = frozenset(["unevaluatedProperties", "unevaluatedItems"])
_SCHEMA_LISTS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
_SCHEMA_MAPS = frozenset(["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"])


_TEXTS = _SCHEMA_MAPS | {"const", "enum", "pattern", "required", "dependentRequired", "dependencies"}
"""Keywords whose strings and property names occur in instances or in error messages."""


def _refuse(pointer: str, message: str, remedy: str | None = None) -> NoReturn:
    """Raise `InvalidConstraint`. Either `message` or `remedy` must tell the user what to write."""
    raise InvalidConstraint(f"{message}.", pointer=pointer, remedy=remedy)


def _check_characters(pointer: str, keyword: str, value: Any) -> None:
    """Raise `InvalidConstraint` if `value` contains half of a surrogate pair, which no instance can
    contain."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidConstraint(
            f"{keyword} has {half!r}, half of a surrogate pair, which is no character.",
            pointer=pointer,
            remedy="Write the whole character.",
        ) from None


Check = Callable[[str, str, Any], None]
"""A check of a keyword's value. Takes the keyword's pointer, name and value, and raises
`InvalidConstraint`."""


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | Decimal():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _number(pointer: str, keyword: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        _refuse(pointer, f"{keyword} is a number, not {_kind(value)}")
    if abs(Decimal(value).adjusted()) > MAX_KEYWORD_DIGITS:
        _refuse(pointer, f"{keyword} has more than {MAX_KEYWORD_DIGITS} digits", "Write fewer digits.")


def _multiple(pointer: str, keyword: str, value: Any) -> None:
    _number(pointer, keyword, value)
    if value <= 0:
        _refuse(pointer, f"{keyword} must be above 0")


def _count(pointer: str, keyword: str, value: Any) -> None:
    _number(pointer, keyword, value)
    if value != int(value) or value < 0:
        _refuse(pointer, f"{keyword} is an integer of 0 or more")


def _of_type(expected: type, words: str) -> Check:
    def check(pointer: str, keyword: str, value: Any) -> None:
        if not isinstance(value, expected):
            _refuse(pointer, f"{keyword} is {words}, not {_kind(value)}")

    return check


_boolean = _of_type(bool, "a boolean")
_string = _of_type(str, "a string")
_list = _of_type(list, "an array")
_map = _of_type(dict, "an object")


def _some(pointer: str, keyword: str, value: Any) -> None:
    _list(pointer, keyword, value)
    if not value:
        _refuse(pointer, f"{keyword} must not be empty")


def _names(pointer: str, keyword: str, value: Any) -> None:
    _list(pointer, keyword, value)
    for i, name in enumerate(value):
        if not isinstance(name, str):
            _refuse(f"{pointer}/{i}", f"{keyword} holds strings, not {_kind(name)}")


def _names_by_name(pointer: str, keyword: str, value: Any) -> None:
    _map(pointer, keyword, value)
    for name, names in value.items():
        if keyword == "dependentRequired" or isinstance(names, list):
            _names(f"{pointer}/{escape(name)}", keyword, names)


def _type(pointer: str, keyword: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        _refuse(pointer, "type must not be empty")
    for name in names:
        if name not in TYPES:
            _refuse(pointer, f"{name!r} is not a type; there are {', '.join(TYPES)}")


_VALUES: dict[str, Check] = {
    "type": _type,
    "enum": _list,
    "multipleOf": _multiple,
    "required": _names,
    "dependentRequired": _names_by_name,
    "dependencies": _names_by_name,
    "uniqueItems": _boolean,
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], _number),
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], _count),
    **dict.fromkeys(["minProperties", "maxProperties", "minContains", "maxContains"], _count),
    **dict.fromkeys(["pattern", "format", "$anchor", "$dynamicAnchor", *REFERENCES], _string),
    **dict.fromkeys(["allOf", "anyOf", "oneOf"], _some),
    "prefixItems": _list,
    **dict.fromkeys(_SCHEMA_MAPS, _map),
}
