"""unevaluatedProperties and unevaluatedItems: what no neighbouring keyword has looked at.

A schema is split into cases, one for each choice among its options; in each it is known which
properties and items are looked at. Values that satisfy several cases at once have a case of their own,
in which all is known that any of them has looked at.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.grammar.schema.check import escape
from ramify.grammar.schema.logic.assertions import OBJECT, Items, Members, Required, Types, absent
from ramify.grammar.schema.logic.formula import FALSE, TRUE, Formula, both, either, negated
from ramify.grammar.schema.unenforceable import refuse

if TYPE_CHECKING:
    from ramify.grammar.schema.logic.keywords import Keywords

MAX_CASES = 128

_LOGIC = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
_MEMBERS = ("properties", "patternProperties", "additionalProperties")
_ITEMS = ("prefixItems", "items", "additionalItems")


class Seen(NamedTuple):
    """What of a value has been looked at. Items below number `items`; None: all of them."""

    names: tuple[str, ...] = ()
    keys: tuple[Formula, ...] = ()
    all_names: bool = False
    items: int | None = 0
    contained: tuple[Formula, ...] = ()

    def and_also(self, other: Seen) -> Seen:
        items = None if self.items is None or other.items is None else max(self.items, other.items)
        return Seen(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.keys + other.keys)),
            self.all_names or other.all_names,
            items,
            tuple(dict.fromkeys(self.contained + other.contained)),
        )


Case = tuple[Formula, Seen]
NOT_SEEN = Seen()


class Unevaluated:
    def __init__(self, keywords: Keywords) -> None:
        self._keywords = keywords

    def formula(self, pointer: str) -> Formula:
        """What the schema at `pointer`, which has one of the two keywords, says."""
        return either(*(formula for formula, _ in self._cases(pointer, ())))

    def _cases(self, pointer: str, path: tuple[str, ...]) -> list[Case]:
        schema = self._keywords.document.at(pointer)
        if isinstance(schema, bool):
            return [(TRUE, NOT_SEEN)] if schema else []
        if pointer in path:
            refuse(
                pointer, "Unevaluated properties or items of a schema that leads back to itself", "Use $ref."
            )
        path = (*path, pointer)
        said = self._keywords.said(pointer)
        plain = [self._keywords.keyword(pointer, said, name) for name in said if name not in _LOGIC]
        cases: list[Case] = [(both(*plain), self._own(pointer, said))]
        for keyword in said:
            if keyword in _LOGIC:
                cases = _product(cases, self._logic(f"{pointer}/{keyword}", said, keyword, path), pointer)
        if "unevaluatedProperties" in said or "unevaluatedItems" in said:
            cases = [self._rest(pointer, said, case) for case in cases]
        return cases

    def _own(self, pointer: str, said: dict[str, Any]) -> Seen:
        seen = NOT_SEEN
        if any(keyword in said for keyword in _MEMBERS):
            keys = tuple(
                self._keywords.key(pointer, pattern) for pattern in said.get("patternProperties", ())
            )
            names = tuple(said.get("properties", ()))
            seen = Seen(names, keys, "additionalProperties" in said)
        if isinstance(said.get("items"), list):
            count = None if "additionalItems" in said else len(said["items"])
        else:
            count = None if "items" in said else len(said.get("prefixItems", ()))
        contained: tuple[Formula, ...] = ()
        if "contains" in said and self._keywords.document.draft != 8:
            contained = (self._keywords.sub(f"{pointer}/contains"),)
        return seen._replace(items=count, contained=contained)

    def _logic(self, where: str, said: dict[str, Any], keyword: str, path: tuple[str, ...]) -> list[Case]:
        value = said[keyword]
        match keyword:
            case "allOf":
                cases: list[Case] = [(TRUE, NOT_SEEN)]
                for i in range(len(value)):
                    cases = _product(cases, self._cases(f"{where}/{i}", path), where)
                return cases
            case "anyOf":
                return self._any(where, value, path)
            case "oneOf":
                return [
                    (both(formula, exclusive), seen)
                    for i, exclusive in enumerate(self._keywords.exclusive(where, value))
                    for formula, seen in self._cases(f"{where}/{i}", path)
                ]
            case "if":
                return self._if(where, said, path)
            case "dependentSchemas":
                cases = [(TRUE, NOT_SEEN)]
                for name in value:
                    there = self._cases(f"{where}/{escape(name)}", path)
                    met = [(both(Types(OBJECT), Required(name), formula), seen) for formula, seen in there]
                    cases = _product(cases, [(absent(name), NOT_SEEN), *met], where)
                return cases
        target = self._keywords.document.target(where.rpartition("/")[0], keyword)
        return self._cases(target, path)

    def _any(self, where: str, value: list[Any], path: tuple[str, ...]) -> list[Case]:
        options = [self._cases(f"{where}/{i}", path) for i in range(len(value))]
        if all(seen == NOT_SEEN for option in options for _, seen in option):
            return [(either(*(formula for option in options for formula, _ in option)), NOT_SEEN)]
        if len(options) > 6:
            refuse(where, "anyOf with more than 6 options beside unevaluated… is not enforced", "Use oneOf.")
        found: list[Case] = []
        for size in range(1, len(options) + 1):
            for chosen in itertools.combinations(options, size):
                cases: list[Case] = [(TRUE, NOT_SEEN)]
                for option in chosen:
                    cases = _product(cases, option, where)
                found += cases
        return _limited(found, where)

    def _if(self, where: str, said: dict[str, Any], path: tuple[str, ...]) -> list[Case]:
        condition = self._cases(where, path)
        branches: list[list[Case]] = []
        for keyword in ("then", "else"):
            branch = where.removesuffix("if") + keyword
            branches.append(self._cases(branch, path) if keyword in said else [(TRUE, NOT_SEEN)])
        failing: list[Case] = [(negated(self._keywords.sub(where)), NOT_SEEN)]
        return _product(condition, branches[0], where) + _product(failing, branches[1], where)

    def _rest(self, pointer: str, said: dict[str, Any], case: Case) -> Case:
        """The case with the two keywords themselves, which look at all that is left."""
        formula, seen = case
        if "unevaluatedProperties" in said:
            wanted = self._keywords.sub(f"{pointer}/unevaluatedProperties")
            if not seen.all_names and wanted != TRUE:
                named = tuple((name, TRUE) for name in seen.names)
                formula = both(formula, Members(named, tuple((key, TRUE) for key in seen.keys), wanted))
            seen = seen._replace(all_names=True)
        if "unevaluatedItems" in said:
            wanted = self._keywords.sub(f"{pointer}/unevaluatedItems")
            if seen.items is not None and wanted != TRUE:
                rest = either(*seen.contained, wanted)
                formula = both(formula, Items((TRUE,) * seen.items, rest))
            seen = seen._replace(items=None)
        return formula, seen


def _product(left: list[Case], right: list[Case], where: str) -> list[Case]:
    pairs = itertools.product(left, right)
    return _limited([(both(a, b), seen.and_also(more)) for (a, seen), (b, more) in pairs], where)


def _limited(cases: list[Case], where: str) -> list[Case]:
    """Cases that look at the same, joined."""
    joined: dict[Seen, list[Formula]] = {}
    for formula, seen in cases:
        if formula != FALSE:
            joined.setdefault(seen, []).append(formula)
    if len(joined) > MAX_CASES:
        refuse(
            where, f"More than {MAX_CASES} cases beside unevaluated… are not enforced", "Use fewer options."
        )
    return [(either(*formulas), seen) for seen, formulas in joined.items()]
