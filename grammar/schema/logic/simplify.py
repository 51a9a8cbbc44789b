"""Disjunctions with fewer options, above all those that come of negations.

The negation of ``{"type": "object", "properties": {"p": {"const": 1}}}`` is a disjunction of

    Types(all but object)
    And(Types(object), Required("p"), Properties(p: not 1))

A formula such as ``if`` adds the option "an object without p". Then the last two options are one assertion,
"p, if present, is not 1", which other types satisfy anyway, so the first option is part of it as well.
"""

from __future__ import annotations

from ramify.grammar.schema.logic.assertions import OBJECT, Properties, Required, Types
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    And,
    Assertion,
    Formula,
    Or,
    conjunction,
    disjunction,
)

MAX_DISTRIBUTED = 40
"""Most options over which a type is distributed."""


def simplified(choice: Or) -> Formula:
    """A formula that the same values satisfy, where possible with fewer options."""
    options = [piece for option in choice.options for piece in _distributed(option)]
    options = _with_properties_joined(options)
    types = [option.types for option in options if isinstance(option, Types)]
    everything = frozenset(TYPES)
    found: list[Formula] = []
    included: set[frozenset[str]] = set()
    for option in options:
        assertion = _only_assertion(option)
        if assertion is not None and any(everything - assertion.kinds <= other for other in types):
            included.add(everything - assertion.kinds)
            found.append(assertion)
        else:
            found.append(option)
    return disjunction(*(o for o in found if not (isinstance(o, Types) and o.types in included)))


def _distributed(option: Formula) -> list[Formula]:
    """``T and (a or b)`` as ``T and a``, ``T and b``, where T are types."""
    if not isinstance(option, And):
        return [option]
    choices = [part for part in option.parts if isinstance(part, Or)]
    if len(choices) != 1 or len(choices[0].options) > MAX_DISTRIBUTED:
        return [option]
    others = [part for part in option.parts if part is not choices[0]]
    if not all(isinstance(part, Types) for part in others):
        return [option]
    return [conjunction(*others, inner) for inner in choices[0].options]


def _only_assertion(option: Formula) -> Assertion | None:
    """The assertion of an option that is one assertion about all values of its types."""
    match option:
        case And((Types(types), Assertion() as assertion)) if types == assertion.kinds:
            return assertion
    return None


def _with_properties_joined(options: list[Formula]) -> list[Formula]:
    """``the object has no p, or a p that satisfies F`` as ``p, if present, satisfies F``."""
    missing = {name for option in options if (name := _missing(option)) is not None}
    values: dict[str, Formula] = {}
    for option in options:
        present = _present(option)
        if present is not None and present[0] in missing:
            values[present[0]] = disjunction(values.get(present[0], FALSE), present[1])
    joined: list[Formula] = []
    for option in options:
        present, name = _present(option), _missing(option)
        if name is not None and name in values:
            joined.append(conjunction(Types(OBJECT), Properties(((name, values[name]),), (), TRUE)))
        elif present is None or present[0] not in values:
            joined.append(option)
    return joined


def _missing(option: Formula) -> str | None:
    """The property that the objects of `option` are without, if that is all it says."""
    match option:
        case And((Types(types), Properties(((name, value),), (), others))):
            if types == OBJECT and value == FALSE and others == TRUE:
                return name
    return None


def _present(option: Formula) -> tuple[str, Formula] | None:
    """The property that the objects of `option` have, and what it satisfies, if that is all it says."""
    match option:
        case And((Types(types), Required(name), Properties(((other, value),), (), others))):
            if types == OBJECT and name == other and others == TRUE:
                return name, value
    return None
