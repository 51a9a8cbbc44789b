"""Constraints compiled by other libraries: XGrammar, llguidance and outlines-core.

The libraries are used unchanged. This module checks that the constraint is valid, and reports the keywords
that the library is not known to enforce (`keywords`). A schema with such keywords is refused if the
constraint's `strict` is True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ramify.constraint import Constraint, Kind
from ramify.errors import InvalidConstraint, RamifyError
from ramify.grammar.compile import keywords
from ramify.grammar.rules import regex_syntax
from ramify.grammar.rules.expression import size
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.json_values import deep_recursion, parse_json
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement, Unenforced
from ramify.text import shortened

IN_ORDER = "Properties come in the schema's order."
CLOSED = "Objects have no other properties than the schema names, unless additionalProperties allows them."


class Compiled(NamedTuple):
    """A compiled constraint: the engine, its payload, and how the grammar differs from the constraint."""

    engine: str
    payload: bytes
    enforcement: Enforcement = Enforcement()


KINDS: dict[str, tuple[Kind, ...]] = {
    "xgrammar": ("json_schema", "json_object", "regex", "choices", "ebnf", "structural_tag"),
    "llguidance": ("json_schema", "json_object", "regex", "choices", "lark"),
    "outlines": ("json_schema", "regex", "choices"),
}
"""The kinds of constraints that each backend can compile."""
_TITLES = {"xgrammar": "XGrammar", "llguidance": "llguidance", "outlines": "outlines-core"}
_CLOSING = ("xgrammar", "outlines")
"""Backends that allow only the properties that a schema names, unless additionalProperties allows others."""


def spacing(constraint: Constraint, backend: str = "ramify") -> str:
    """A sentence that says which white space a JSON constraint allows."""
    match constraint.whitespace:
        case "natural" if backend == "outlines":
            return "White space: at most one space between any two parts."
        case "natural":
            return "White space: one space after each comma and colon, no other."
        case "compact" | 0:
            return "White space: none."
    return f"White space: at most {constraint.whitespace} characters between any two parts."


def no_such_kind(constraint: Constraint, backend: str) -> InvalidConstraint:
    return InvalidConstraint(
        f"{backend} cannot do constraints of kind {constraint.kind}.",
        field=constraint.kind,
        remedy="Start the engine with grammar_backend='auto' (--grammar-backend auto), which can.",
    )


def library_of(backend: str) -> tuple[str, Callable[[Constraint, Vocabulary], bytes]]:
    """The engine that runs the grammars of `backend`, and the function that compiles a constraint with its
    library. Imports the library."""
    if backend == "xgrammar":
        from ramify.grammar.engine import xgrammar

        return "xgrammar", xgrammar.compile_constraint
    if backend == "llguidance":
        from ramify.grammar.engine import llguidance

        return "llguidance", llguidance.compile_constraint
    from ramify.grammar.compile import outlines

    return "pushdown", outlines.compile_constraint


def compile_foreign(
    constraint: Constraint, vocabulary: Vocabulary, backend: str, *, exactly: bool = False
) -> Compiled:
    """Compile a constraint that was checked already, with the library of `backend`.

    Raises `InvalidConstraint` if the library refuses the constraint or cannot compile its kind. Raises
    `Unenforceable` if `strict` is True and the schema has a keyword that the library is not known to enforce.
    With `exactly`, raises `InvalidConstraint` also if the library is known to reject valid instances of the
    schema, or may take long to compile it.
    """
    if constraint.kind not in KINDS[backend]:
        raise no_such_kind(constraint, backend)
    enforcement = _enforcement(constraint, backend, exactly)
    if exactly:
        _check_size(constraint)
    engine, compile_with = library_of(backend)
    try:
        payload = compile_with(constraint, vocabulary)
    except InvalidConstraint as error:
        if constraint.kind != "lark":
            error.remedy = error.remedy or (
                f"Write it as {backend} takes it, or start the engine with grammar_backend='auto'"
                " (--grammar-backend auto)."
            )
        raise
    except (RamifyError, MemoryError, RecursionError):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = shortened(" ".join(str(error).split()).rstrip(" ."), 300)
        raise InvalidConstraint(
            f"{backend} cannot compile it: {reason}.",
            field=constraint.kind,
            remedy="Start the engine with grammar_backend='auto' (--grammar-backend auto).",
        ) from None
    return Compiled(engine, payload, enforcement)


MOST_CHARACTERS = 2000
"""Most characters of outlines-core's pattern, with its repetitions written out, in `compile_foreign` with
`exactly`."""


def _check_size(constraint: Constraint) -> None:
    """Raise `InvalidConstraint` for a schema that outlines-core may take long to compile, because its pattern
    is large."""
    from ramify.grammar.compile import outlines

    if size(regex_syntax.full_match(outlines.pattern_of(constraint))) > MOST_CHARACTERS:
        raise InvalidConstraint("outlines-core's pattern is too large.", remedy="Use smaller repetitions.")


def _enforcement(constraint: Constraint, backend: str, exactly: bool) -> Enforcement:
    whole = backend == "outlines"
    if constraint.kind == "structural_tag":
        unenforced: list[Unenforced] = []
        for schema, pointer, strict in _schemas_in(parse_json(constraint.source)):
            left_out = keywords.unenforced(_document(schema, pointer), backend)
            if strict:
                _refuse_widened(left_out, pointer)
            unenforced += [msgspec.structs.replace(one, schema=pointer + one.schema) for one in left_out]
        return Enforcement(
            backend=backend, unenforced=tuple(unenforced), narrowed=(IN_ORDER, CLOSED), whole=whole
        )
    if constraint.kind not in ("json_schema", "json_object"):
        return Enforcement(backend=backend, whole=whole)
    if constraint.any_order:
        raise InvalidConstraint(
            f"{backend} has no any_order: it writes properties in the schema's order.",
            field="any_order",
            remedy="Leave it out, or start the engine with grammar_backend='auto'.",
        )
    document = _document(parse_json(constraint.source or '{"type": "object"}'))
    left_out = keywords.unenforced(document, backend)
    if constraint.strict is True:
        _refuse_widened(left_out)
    rejects = keywords.narrowed(document, backend)
    if exactly and rejects:
        raise InvalidConstraint(
            f"{backend} rejects valid instances for {rejects[0]}.", remedy="Leave that keyword out."
        )
    has_objects = constraint.kind == "json_object" or any(map(_allows_objects, document.subschemas.values()))
    narrowed = (
        *([IN_ORDER] if has_objects else []),
        *([CLOSED] if has_objects and backend in _CLOSING else []),
        spacing(constraint, backend),
        *(_writes_fewer(backend, name) for name in rejects),
    )
    return Enforcement(backend=backend, unenforced=left_out, narrowed=narrowed, whole=whole)


def _allows_objects(subschema: Any) -> bool:
    """Whether a subschema allows objects, judged by `type`, `enum` and `const` alone."""
    if not isinstance(subschema, dict):
        return subschema is True
    if "enum" in subschema or "const" in subschema:
        return any(isinstance(value, dict) for value in [*subschema.get("enum", ()), subschema.get("const")])
    types = subschema.get("type", "object")
    return "object" in ([types] if isinstance(types, str) else types)


def _writes_fewer(backend: str, feature: str) -> str:
    keyword, _, other = feature.partition(" | ")
    beside = f", beside {other}," if other and not other.startswith("no ") else ""
    without = f", without {other[3:]}," if other.startswith("no ") else ""
    return f"{_TITLES[backend]} writes fewer texts than {keyword}{beside}{without} allows."


def _document(schema: Any, pointer: str = "") -> SchemaDocument:
    with deep_recursion():
        try:
            return SchemaDocument(schema)
        except InvalidConstraint as error:
            error.pointer = pointer + (error.pointer or "")
            raise


def _refuse_widened(left_out: tuple[Unenforced, ...], pointer: str = "") -> None:
    if left_out:
        raise Unenforceable(
            left_out[0].message,
            pointer=pointer + left_out[0].schema,
            remedy='Leave the keyword out, set strict to "validate", or start the engine with'
            " grammar_backend='auto' (--grammar-backend auto).",
        )


def _schemas_in(tag: Any, pointer: str = "") -> list[tuple[Any, str, bool]]:
    """The JSON schemas in a structural tag: (schema, its pointer, whether all its keywords must be
    enforced)."""
    found = []
    if isinstance(tag, dict):
        for name, value in tag.items():
            where = f"{pointer}/{name}"
            if name in ("json_schema", "schema") and isinstance(value, dict | bool):
                found.append((value, where, tag.get("strict") is not False))
            else:
                found += _schemas_in(value, where)
    elif isinstance(tag, list):
        for i, value in enumerate(tag):
            found += _schemas_in(value, f"{pointer}/{i}")
    return found
