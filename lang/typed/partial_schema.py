"""Checkers that validate the values inside a value with a JSON schema before the whole value is complete.

The checker of a member has the JSON pointers of the subschemas that apply to the member. Example:

    schema    {"properties": {"a": {"type": "integer"}}, "anyOf": [{"properties": {"a": {"minimum": 5}}}, …]}
    child(a)  /properties/a must hold, and at least one of /anyOf/0/properties/a, …
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ramify.grammar.schema.document.check import REFERENCES, SchemaDocument
from ramify.grammar.schema.document.json_values import as_decimals, deep_recursion
from ramify.grammar.schema.document.string_patterns import matches_pattern
from ramify.grammar.schema.instance import Validator
from ramify.json_text import escape, read_json


def schema_checker(schema: Any) -> SchemaChecker:
    """The checker of the root value under `schema`. Raises `InvalidConstraint` for an invalid schema."""
    return SchemaChecker(SchemaDocument(as_decimals(schema)), [""])


class SchemaChecker:
    """The checker of the values at one place in a value. The values must satisfy all subschemas at
    `pointers`, and at least one checker of each list in `_alternatives`."""

    def __init__(self, document: SchemaDocument, pointers: list[str]) -> None:
        self._document = document
        self._pointers = pointers
        self._alternatives: list[list[SchemaChecker]] = []

    def check(self, raw: str) -> Any:
        value = read_json(raw, strict=False)
        with deep_recursion():
            problem = next(self._problems(as_decimals(value)), None)
        if problem is not None:
            raise ValueError(problem)
        return value

    def _problems(self, value: Any) -> Iterator[str]:
        for pointer in self._pointers:
            for failure in Validator(self._document).failures(pointer, value):
                yield f"{failure.message} ({failure.schema})."
        for checkers in self._alternatives:
            problems = [next(checker._problems(value), None) for checker in checkers]
            if None not in problems:
                yield next(filter(None, problems), "No alternative of the schema has such a member.")

    def opened(self, members: Any) -> Any:
        """The value of an open object or array at this place: `members`, as of plain JSON."""
        return members

    def child(self, key: str | int) -> SchemaChecker:
        return self._child(key, frozenset())

    def _child(self, key: str | int, referenced: frozenset[str]) -> SchemaChecker:
        found = SchemaChecker(self._document, [])
        for pointer in self._pointers:
            found._add_members(pointer, key, referenced)
        for checkers in self._alternatives:
            found._add_alternatives(checkers, key, referenced)
        return found

    def _add_members(self, pointer: str, key: str | int, referenced: frozenset[str]) -> None:
        """Add the subschemas that the subschema at `pointer` has for the member `key`. `referenced` holds the
        pointers of the subschemas whose references have been followed. Those references are not followed
        again, so a cycle of references ends."""
        if isinstance(self._document.at(pointer), bool):
            return
        keywords = self._document.keywords(pointer)
        for keyword in REFERENCES:
            if keyword in keywords and pointer not in referenced:
                target = self._document.target(pointer, keyword)
                self._add_members(target, key, referenced | {pointer})
        members = _item(keywords, key) if isinstance(key, int) else _property(pointer, keywords, key)
        self._pointers += [f"{pointer}/{member}" for member in members]
        for index in range(len(keywords.get("allOf", ()))):
            self._add_members(f"{pointer}/allOf/{index}", key, referenced)
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                pointers = [f"{pointer}/{keyword}/{index}" for index in range(len(keywords[keyword]))]
                self._add_alternatives(
                    [SchemaChecker(self._document, [one]) for one in pointers], key, referenced
                )

    def _add_alternatives(
        self, checkers: list[SchemaChecker], key: str | int, referenced: frozenset[str]
    ) -> None:
        kind = "array" if isinstance(key, int) else "object"
        possible = [checker for checker in checkers if checker._allows(kind)]
        self._alternatives.append([checker._child(key, referenced) for checker in possible])

    def _allows(self, kind: str) -> bool:
        """Whether all subschemas at `pointers` allow values of the type `kind`, by their keyword ``type``."""
        schemas = [self._document.at(pointer) for pointer in self._pointers]
        return all(isinstance(one, bool) or kind in one.get("type", kind) for one in schemas)


def _item(keywords: dict[str, Any], index: int) -> list[str]:
    """The JSON pointer, relative to a subschema with these keywords, of the subschema of the item at `index`,
    as a list with at most one element."""
    items = keywords.get("items")
    prefix, rest = ("items", "additionalItems") if isinstance(items, list) else ("prefixItems", "items")
    if index < len(keywords.get(prefix, ())):
        return [f"{prefix}/{index}"]
    return [rest] if rest in keywords else []


def _property(pointer: str, keywords: dict[str, Any], name: str) -> list[str]:
    """The JSON pointers, relative to the subschema at `pointer` with these keywords, of the subschemas of the
    property `name`."""
    found = [f"properties/{escape(name)}"] if name in keywords.get("properties", ()) else []
    for pattern in keywords.get("patternProperties", ()):
        member = f"patternProperties/{escape(pattern)}"
        if matches_pattern(f"{pointer}/{member}", pattern, name):
            found.append(member)
    if not found and "additionalProperties" in keywords:
        found.append("additionalProperties")
    return found
