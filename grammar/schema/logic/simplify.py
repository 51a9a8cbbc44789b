"""Simplification of disjunctions to fewer options, above all of disjunctions that result from negations.

The negation of ``{"type": "object", "properties": {"p": {"const": 1}}}`` is a disjunction of

    Types(all but object)
    And(Types(object), Required("p"), Properties(p: not 1))

A formula such as ``if`` adds the option "an object without p". This option and the second one together are
the assertion "p, if present, is not 1". All values of other types satisfy this assertion, so the first option
is contained in it as well.
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
"""Most options of a disjunction over which types are distributed."""


def simplified(choice: Or) -> Formula:
    """An equivalent formula, with fewer options if possible."""
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
    """Split an option of the form ``T and (a or b)``, where T are types, into ``T and a`` and ``T and b``."""
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
    """The assertion of an option that consists of types and one assertion about exactly these types; else
    None."""
    match option:
        case And((Types(types), Assertion() as assertion)) if types == assertion.kinds:
            return assertion
    return None


def _with_properties_joined(options: list[Formula]) -> list[Formula]:
    """Replace the options "the object has no p" and "p satisfies F" by the one option "p, if present,
    satisfies F"."""
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
    """The name of the property that `option` forbids, if forbidding it is all that `option` does; else
    None."""
    match option:
        case And((Types(types), Properties(((name, value),), (), others))):
            if types == OBJECT and value == FALSE and others == TRUE:
                return name
    return None


def _present(option: Formula) -> tuple[str, Formula] | None:
    """The name of the property that `option` requires and the formula for its value, if that is all that
    `option` asserts; else None."""
    match option:
        case And((Types(types), Required(name), Properties(((other, value),), (), others))):
            if types == OBJECT and name == other and others == TRUE:
                return name, value
    return None
