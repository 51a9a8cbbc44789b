"""Alternatives joined into one fact: "no object, or without the property, or with another value there"."""

from __future__ import annotations

from ramify.grammar.schema.logic.assertions import OBJECT, Members, Required, Types
from ramify.grammar.schema.logic.formula import FALSE, TRUE, TYPES, And, Fact, Formula, Or, both, either


def simplified(choice: Or) -> Formula:
    """The same as `choice`, with fewer options where it negates a schema of one type.

    The negation of ``{"type": T, …}`` has an option for all other types and one for values of the type T
    that do not satisfy some fact about T. Such a fact holds for other types anyway, so it says both.
    """
    options = [piece for option in choice.options for piece in _distributed(option)]
    options = _with_members_joined(options)
    types = [option.types for option in options if isinstance(option, Types)]
    everything = frozenset(TYPES)
    found: list[Formula] = []
    said: set[frozenset[str]] = set()
    for option in options:
        fact = _only_fact(option)
        if fact is not None and any(everything - fact.kinds <= other for other in types):
            said.add(everything - fact.kinds)
            found.append(fact)
        else:
            found.append(option)
    return either(*(o for o in found if not (isinstance(o, Types) and o.types in said)))


def _distributed(option: Formula) -> list[Formula]:
    """``T and (a or b)`` as ``T and a``, ``T and b``."""
    if not isinstance(option, And):
        return [option]
    choices = [part for part in option.parts if isinstance(part, Or)]
    if len(choices) != 1 or len(choices[0].options) > 40:
        return [option]
    others = [part for part in option.parts if part is not choices[0]]
    if not all(isinstance(part, Types) for part in others):
        return [option]
    return [both(*others, inner) for inner in choices[0].options]


def _only_fact(option: Formula) -> Fact | None:
    """The fact of an option that says one thing about all values of some types."""
    match option:
        case And((Types(types), Fact() as fact)) if types == fact.kinds:
            return fact
    return None


def _with_members_joined(options: list[Formula]) -> list[Formula]:
    """``the object has no p, or a p that satisfies F`` as ``a p, if there is one, satisfies F``."""
    missing = {name for option in options if (name := _missing(option)) is not None}
    values: dict[str, Formula] = {}
    for option in options:
        found = _present(option)
        if found is not None and found[0] in missing:
            values[found[0]] = either(values.get(found[0], FALSE), found[1])
    if not values:
        return options
    joined: list[Formula] = []
    for option in options:
        present = _present(option)
        name = _missing(option)
        if name is not None and name in values:
            joined.append(both(Types(OBJECT), Members(((name, values[name]),), (), TRUE)))
        elif present is None or present[0] not in values:
            joined.append(option)
    return joined


def _missing(option: Formula) -> str | None:
    match option:
        case And((Types(types), Members(((name, value),), (), others))):
            if types == OBJECT and value == FALSE and others == TRUE:
                return name
    return None


def _present(option: Formula) -> tuple[str, Formula] | None:
    match option:
        case And((Types(types), Required(name), Members(((other, value),), (), others))):
            if types == OBJECT and name == other and others == TRUE:
                return name, value
    return None
