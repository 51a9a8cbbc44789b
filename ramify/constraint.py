"""Constraints on the output of a generation: schemas, regular expressions, grammars and choices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ramify.errors import InvalidConstraint
from ramify.schema_bundle import Definitions, Find, bundled, bundled_tag, check_size, finder

Kind = Literal["json_schema", "json_object", "regex", "ebnf", "lark", "choices", "structural_tag"]

Whitespace = Literal["natural", "compact"] | int
"""White space in JSON. "natural": one space after each comma and colon. "compact": none. A number n: up to n
spaces, tabs and line ends wherever JSON allows white space."""

Strict = bool | Literal["validate"]
"""Treatment of schema keywords that cannot be enforced token by token: True refuses the schema, "validate"
checks the complete value, False ignores the keyword."""

CONTROLS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Control tokens that a constraint may contain (`with_controls`)."""

NO_CONTROL = chr(0x10F0FF)
"""A private-use character that represents no token; other such characters represent `CONTROLS`. Free text
that ends at a control token must exclude `NO_CONTROL`. Where a grammar allows `NO_CONTROL`, characters that
represent control tokens count as plain text."""

MAX_WHITESPACE = 100
"""Greatest `whitespace`, in characters between two JSON tokens."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the text of one generation.

    `source` is the JSON text of the schema (key order kept), the regular expression, the EBNF
    or Lark grammar, a JSON array of strings for ``choices``, the JSON text of a structural tag, or empty
    for ``json_object``.

    The other fields apply to JSON kinds only. With `any_order`, the properties that a schema names may come
    in any order; without `any_order`, only in the order of the schema.
    """

    kind: Kind
    source: str = ""
    whitespace: Whitespace = "natural"
    any_order: bool = False
    strict: Strict = True

    @property
    def key(self) -> str:
        """A hash that is the same in all processes and versions. Compiled grammars are stored under it."""
        content = f"{self.kind}\0{self.source}"
        options = (self.whitespace, self.any_order, self.strict)
        if options != ("natural", False, True):
            content += f"\0{options}"
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def check(self) -> Constraint:
        """Return self; raise `InvalidConstraint` if the source is too long, empty or not valid Unicode, or if
        an option has a wrong value."""
        self._check_options()
        if not isinstance(self.source, str):
            raise InvalidConstraint(
                f"The {self.kind} is {self.source!r:.80}; it must be text.", field=self.kind
            )
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise InvalidConstraint(f"The {self.kind} is not valid Unicode.", field=self.kind) from None
        check_size(self.kind, size)
        if not self.source and self.kind != "json_object":
            raise InvalidConstraint(f"The {self.kind} is empty.", field=self.kind)
        return self

    def _check_options(self) -> None:
        size = self.whitespace
        known = size in ("natural", "compact") or (
            isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_WHITESPACE
        )
        if not known:
            raise InvalidConstraint(
                f'whitespace is {size!r}; it must be "natural", "compact", or a number from 0 to '
                f"{MAX_WHITESPACE}.",
                field="whitespace",
            )
        if not isinstance(self.any_order, bool):
            raise InvalidConstraint(
                f"any_order is {self.any_order!r}; it must be a boolean.", field="any_order"
            )
        if self.strict not in (True, False, "validate"):
            raise InvalidConstraint(
                f'strict is {self.strict!r}; it must be true, false or "validate".', field="strict"
            )
        for field in ("whitespace", "any_order", "strict"):
            if not self.kind.startswith("json_") and getattr(self, field) != getattr(_PLAIN, field):
                raise InvalidConstraint(
                    f"{field} is for JSON, not for a constraint of kind {self.kind}.", field=field
                )


_PLAIN = Constraint(kind="json_object")


def checked(given: Constraint) -> Constraint:
    """Return `given`; raise `InvalidConstraint` if it is not a `Constraint`, or if its fields are wrong."""
    if not isinstance(given, Constraint):
        raise InvalidConstraint(
            f"constraint is {given!r:.80}; it must be a Constraint.",
            field="constraint",
            remedy="Make one with ramify.constraint: json_schema, regex, ebnf, lark, choices.",
        )
    return given.check()


def json_schema(
    schema: Mapping[str, Any] | bool | str,
    *,
    whitespace: Whitespace = "natural",
    any_order: bool = False,
    strict: Strict = True,
    definitions: Definitions | None = None,
) -> Constraint:
    """A constraint from a JSON schema given as a mapping, a boolean, or JSON text.

    `definitions` supplies the external schemas that ``$ref``s in `schema` point to: a mapping from URI to
    schema, or the path of a folder of schemas (`schema_bundle`). Nothing is ever fetched.
    """
    if isinstance(schema, str):
        source = schema
    else:
        try:
            source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidConstraint(
                f"The schema cannot be written as JSON: {error}.", field="json_schema"
            ) from None
    found = Constraint(
        kind="json_schema", source=source, whitespace=whitespace, any_order=any_order, strict=strict
    )
    return found.check() if definitions is None else with_definitions(found, finder(definitions))


def with_definitions(given: Constraint, find: Find) -> Constraint:
    """`given`, with the external schemas that its schemas refer to embedded.

    `find` finds a schema (`schema_bundle.finder`).
    """
    given.check()
    if given.kind not in ("json_schema", "structural_tag"):
        return given
    bundle = bundled if given.kind == "json_schema" else bundled_tag
    source = bundle(given.source, find)
    return given if source == given.source else msgspec.structs.replace(given, source=source).check()


def closed_object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with exactly these properties, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def json_object(*, whitespace: Whitespace = "natural") -> Constraint:
    """A constraint to any JSON object."""
    return Constraint(kind="json_object", whitespace=whitespace).check()


def regex(pattern: str) -> Constraint:
    """A constraint to output of which the whole matches `pattern`, from the first to the last character."""
    return Constraint(kind="regex", source=pattern).check()


def ebnf(grammar: str) -> Constraint:
    """A constraint to the language of a context-free grammar in GBNF notation, whose start rule is
    ``root``."""
    return Constraint(kind="ebnf", source=grammar).check()


def lark(grammar: str) -> Constraint:
    """A constraint to the language of a grammar in Lark's notation, as llguidance reads it, whose start rule
    is ``start``."""
    return Constraint(kind="lark", source=grammar).check()


def grammar(given: Constraint | str) -> Constraint:
    """The constraint for `given`: a constraint, or the text of a grammar.

    A text with ``::=`` is read as GBNF, any other as Lark's notation.
    """
    if isinstance(given, Constraint):
        return given.check()
    if not isinstance(given, str):
        raise InvalidConstraint(
            f"grammar is {given!r:.80}; it must be a constraint or text.", field="grammar"
        )
    if not given:
        raise InvalidConstraint("grammar is empty.", field="grammar")
    return ebnf(given) if "::=" in given else lark(given)


def choices(options: Sequence[str]) -> Constraint:
    """A constraint to exactly one of `options`."""
    if not options or any(not isinstance(option, str) for option in options):
        raise InvalidConstraint("choices must be a non-empty list of strings.", field="choices")
    return Constraint(kind="choices", source=json.dumps(list(options), ensure_ascii=False)).check()


def structural_tag(tag: Mapping[str, Any] | str) -> Constraint:
    """A constraint to a structural tag of XGrammar: free text with tags, whose content is constrained."""
    source = tag if isinstance(tag, str) else json.dumps(tag, ensure_ascii=False)
    return Constraint(kind="structural_tag", source=source).check()


def alternation(source: str) -> str:
    """A regular expression that matches exactly the strings in `source`, a JSON array."""
    return "|".join("(?:" + "".join(map(_escaped, option)) + ")" for option in json.loads(source))


def _escaped(char: str) -> str:
    return char if char.isalnum() or not char.isascii() else f"\\x{ord(char):02x}"


def with_controls(text: str) -> str:
    """`text` for a constraint, in which the spelling of each of `CONTROLS` is to mean the control token.

    Each spelling is replaced by the private-use character that represents the token: U+10F000 for the first
    of `CONTROLS`, U+10F001 for the second, and so on.
    """
    for index, name in enumerate(CONTROLS):
        text = text.replace(name, chr(0x10F000 + index))
    return text
