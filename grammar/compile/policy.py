"""Which engine compiles which constraint.

    regex, choices              pushdown, deterministic
    json_schema, json_object    pushdown, from rules (`schema.compiler`); nondeterministic where there is no
    ebnf, structural_tag        deterministic automaton (rules of `gbnf` and `structural_tag`)
    lark                        llguidance

`compile_constraint` returns bytes for `engine.load.load_grammar` in another process.
"""

from __future__ import annotations

from collections.abc import Callable

from ramify.constraint import Constraint, Kind, json_schema
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.compiler import MAX_STATES, compile_grammar, compile_rules
from ramify.grammar.automaton.positions import NotCounted, TooLarge
from ramify.grammar.compile.structural_tag import structural_tag_rules
from ramify.grammar.rules import regex_syntax
from ramify.grammar.rules.expression import Expression, alt, size, text
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.rules.left_recursion import without_left_recursion
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.schema.compiler import CompiledSchema, Options, compile_schema
from ramify.grammar.schema.values.json_text import parse_json
from ramify.grammar.vocabulary import Vocabulary

MAX_SIZE = 50_000
"""Most characters of a pattern with its repetitions expanded."""

MAX_CHOICE_STATES = 1_000_000
"""Most states of a list of choices, one for each character in which they differ."""

_FORMATS = (
    *("date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference"),
)
_STRINGS = {name: {"type": "string", "format": name} for name in _FORMATS}
PREPARED = json_schema({"type": "object", "properties": _STRINGS})
"""A schema of common parts. The automata of other formats are made when they are first needed."""

Compiled = tuple[str, bytes]
"""The name of the engine, and its payload."""


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> Compiled:
    """Compile `constraint`. Time and memory are unbounded: the caller sets limits.

    Raises `InvalidConstraint`; for schemas, with the JSON pointer of the invalid or unenforceable part.
    """
    constraint.check()
    if constraint.kind in ("json_schema", "json_object"):
        return _json(constraint, vocabulary)
    return _COMPILERS[constraint.kind](constraint.source, vocabulary)


def prepare(vocabulary: Vocabulary) -> None:
    """Compile `PREPARED` (0.5 s): what it needs is there for later constraints, and in forked processes."""
    compile_constraint(PREPARED, vocabulary)


def _regex(source: str, vocabulary: Vocabulary) -> Compiled:
    expression = regex_syntax.full_match(source)
    if size(expression) > MAX_SIZE:
        raise InvalidConstraint(
            f"The pattern has {size(expression)} characters with its repetitions written out; at most "
            f"{MAX_SIZE} are accepted.",
            remedy="Use smaller repetition counts.",
        )
    return _regular(expression, vocabulary)


def _regular(expression: Expression, vocabulary: Vocabulary, most_states: int = MAX_STATES) -> Compiled:
    try:
        return "pushdown", compile_rules({ROOT: expression}, vocabulary, most_states).to_bytes()
    except TooLarge:
        raise InvalidConstraint(
            "The constraint has too many states with its repetitions written out.",
            remedy="Use fewer or smaller repetitions.",
        ) from None


def _choices(source: str, vocabulary: Vocabulary) -> Compiled:
    options = parse_json(source)
    if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
        raise InvalidConstraint("The choices are not a non-empty JSON array of strings.", field="choices")
    for i, option in enumerate(options):
        try:
            spelled = option.encode()
        except UnicodeEncodeError:
            raise _bad_choice(i, "is not valid Unicode") from None
        if not vocabulary.spelled_bytes.issuperset(spelled):
            raise _bad_choice(i, "has a character that this model's tokenizer cannot spell")
    return _regular(alt(*map(text, options)), vocabulary, MAX_CHOICE_STATES)


def _bad_choice(i: int, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"Choice {i} {what}.", field="choices", pointer=f"/{i}")


def _json(constraint: Constraint, vocabulary: Vocabulary) -> Compiled:
    schema = parse_json(constraint.source) if constraint.kind == "json_schema" else {"type": "object"}
    options = Options(constraint.whitespace, constraint.any_order, constraint.strict)
    return _rules(lambda counted: compile_schema(schema, options._replace(counted=counted)), vocabulary)


def _rules(compiled: Callable[[bool], CompiledSchema], vocabulary: Vocabulary) -> Compiled:
    """The automaton of the rules that `compiled` makes; without counting, those of shorter strings and
    arrays."""
    try:
        try:
            found = compiled(True)
            automaton = compile_grammar(found.rules, vocabulary)
        except NotCounted:
            found = compiled(False)
            automaton = compile_grammar(found.rules, vocabulary, counting=False)
    except TooLarge:
        raise InvalidConstraint(
            "The constraint has too many states with its repetitions written out.",
            remedy="Use fewer or smaller repetitions, and fewer alternatives that begin alike.",
        ) from None
    automaton.unenforced = found.unenforced
    return "pushdown", automaton.to_bytes()


def _ebnf(source: str, vocabulary: Vocabulary) -> Compiled:
    rules = without_left_recursion(grammar_rules(source))
    return _rules(lambda counted: CompiledSchema(rules, ()), vocabulary)


def _structural_tag(source: str, vocabulary: Vocabulary) -> Compiled:
    tag = parse_json(source)
    return _rules(lambda counted: CompiledSchema(structural_tag_rules(tag, counted=counted), ()), vocabulary)


def _lark(source: str, vocabulary: Vocabulary) -> Compiled:
    from ramify.grammar.engine.lark import compile_lark

    return "llguidance", compile_lark(source, vocabulary)


_COMPILERS: dict[Kind, Callable[[str, Vocabulary], Compiled]] = {
    "regex": _regex,
    "choices": _choices,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
    "lark": _lark,
}
