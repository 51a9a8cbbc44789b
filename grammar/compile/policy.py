"""Choice of the engine that compiles a constraint.

Choices of the backend "ramify", which "auto" tries first:

    regex, choices              pushdown, deterministic
    json_schema, json_object    pushdown, from rules (`schema.compiler`); nondeterministic where there is no
    ebnf, structural_tag        deterministic automaton (rules of `gbnf` and `structural_tag`)
    lark                        llguidance (with "auto" alone)

All other backends are in `foreign`. `compile_constraint` returns bytes for `engine.load.load_grammar` in
another process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import msgspec

from ramify.constraint import Constraint, Kind, json_schema
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.compiler import MAX_STATES, compile_grammar, compile_rules
from ramify.grammar.automaton.construction.nodes import NotCounted, TooLarge
from ramify.grammar.compile.foreign import IN_ORDER, Compiled, compile_foreign, no_such_kind, spacing
from ramify.grammar.compile.structural_tag import compile_tag
from ramify.grammar.rules import regex_syntax
from ramify.grammar.rules.expression import Expression, alt, size, text
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.rules.left_recursion import without_left_recursion
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.schema.compiler import CompiledSchema, compile_schema
from ramify.grammar.schema.document.json_values import parse_json, place_of_long_number
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.values.schema_grammar import Options
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement, Unenforced

MAX_SIZE = 50_000
"""Most characters of a pattern, counted with its repetitions written out."""

MAX_CHOICE_STATES = 1_000_000
"""Most states of the automaton of a list of choices. The automaton has one state for each character of the
prefix tree of the choices."""

_FORMATS = (
    *("date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference"),
)
_STRINGS = {name: {"type": "string", "format": name} for name in _FORMATS}
PREPARED = json_schema({"type": "object", "properties": _STRINGS})
"""The schema compiled at start (`prepare`), so that the automata of its string formats are ready. The
automata of other formats are built on first use."""

SUCCESSORS = ("outlines",)
"""Backends that "auto" tries, in this order, for a schema that our own engine cannot enforce. Only backends
whose answers are complete under every token budget are listed."""


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    # Compiling makes some 100,000 objects and no cycles; looking for cycles takes a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_without_collecting()
def compile_constraint(constraint: Constraint, vocabulary: Vocabulary, backend: str = "auto") -> Compiled:
    """Compile `constraint`. Time and memory are not limited here; the caller sets limits.

    `backend` is one of `EngineConfig.grammar_backend`. With "auto", a schema that our own engine cannot
    enforce is compiled by a backend that enforces each of the schema's keywords exactly (`keywords`), if
    there is one.

    Raises `InvalidConstraint`. For a schema, the error has the JSON pointer of the invalid or unenforceable
    part.
    """
    constraint.check()
    try:
        return _compile(constraint, vocabulary, backend)
    except InvalidConstraint as error:
        if error.pointer is None and constraint.kind in ("json_schema", "structural_tag"):
            error.pointer = place_of_long_number(constraint.source)
        raise


def _compile(constraint: Constraint, vocabulary: Vocabulary, backend: str) -> Compiled:
    if constraint.kind == "choices":
        _check_choices(constraint.source, vocabulary)
    if backend not in ("auto", "ramify"):
        return compile_foreign(constraint, vocabulary, backend)
    if constraint.kind == "lark":
        if backend == "auto":
            return compile_foreign(constraint, vocabulary, "llguidance")
        raise no_such_kind(constraint, "Ramify's own engine")
    if constraint.kind == "structural_tag":
        return _structural_tag(constraint, vocabulary)
    if constraint.kind not in ("json_schema", "json_object"):
        return Compiled("pushdown", _COMPILERS[constraint.kind](constraint.source, vocabulary))
    if backend == "ramify":
        return _json(constraint, vocabulary)
    strictly = msgspec.structs.replace(constraint, strict=True)
    try:
        return _json(strictly, vocabulary)
    except Unenforceable as refusal:
        for other in SUCCESSORS:
            with contextlib.suppress(Exception):  # our own refusal stands
                return compile_foreign(strictly, vocabulary, other, exactly=True)
        if constraint.strict is True:
            raise refusal
    return _json(constraint, vocabulary)


def prepare(vocabulary: Vocabulary) -> None:
    """Compile `PREPARED` (0.5 s). Its parts then stay cached for later constraints, also in processes forked
    from this one."""
    compile_constraint(PREPARED, vocabulary)


WARMING = json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
"""The schema that `warm` compiles, in 5 ms."""


def warm(vocabulary: Vocabulary) -> None:
    """Compile `WARMING`, so that a process just forked has its own copies of the memory pages that compiling
    writes to."""
    compile_constraint(WARMING, vocabulary)


def _regex(source: str, vocabulary: Vocabulary) -> bytes:
    expression = regex_syntax.full_match(source)
    if size(expression) > MAX_SIZE:
        raise InvalidConstraint(
            f"The pattern has {size(expression)} characters with its repetitions written out; at most "
            f"{MAX_SIZE} are accepted.",
            remedy="Use smaller repetition counts.",
        )
    return _regular(expression, vocabulary)


def _regular(expression: Expression, vocabulary: Vocabulary, most_states: int = MAX_STATES) -> bytes:
    try:
        return compile_rules({ROOT: expression}, vocabulary, most_states).to_bytes()
    except TooLarge:
        raise InvalidConstraint(
            f"The constraint has more than {most_states} states with its repetitions written out.",
            remedy="Use fewer or smaller repetitions, which are multiplied within one another.",
        ) from None


def _check_choices(source: str, vocabulary: Vocabulary) -> None:
    options = parse_json(source)
    if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
        raise InvalidConstraint(
            "The choices are not a non-empty JSON array of strings.",
            field="choices",
            remedy="Send at least one string.",
        )
    for i, option in enumerate(options):
        try:
            spelled = option.encode()
        except UnicodeEncodeError:
            raise _bad_choice(i, "is not valid Unicode") from None
        if not vocabulary.spelled_bytes.issuperset(spelled):
            raise _bad_choice(i, "has a character that this model's tokenizer cannot spell")


def _choices(source: str, vocabulary: Vocabulary) -> bytes:
    return _regular(alt(*map(text, parse_json(source))), vocabulary, MAX_CHOICE_STATES)


def _bad_choice(i: int, what: str) -> InvalidConstraint:
    return InvalidConstraint(
        f"Choice {i} {what}.",
        field="choices",
        pointer=f"/{i}",
        remedy="Leave it out, or write it in other characters.",
    )


def _json(constraint: Constraint, vocabulary: Vocabulary) -> Compiled:
    schema = parse_json(constraint.source) if constraint.kind == "json_schema" else {"type": "object"}
    options = Options(constraint.whitespace, constraint.any_order, constraint.strict)
    payload, unenforced = _rules(
        lambda counted: compile_schema(schema, options._replace(counted=counted)), vocabulary
    )
    order = () if constraint.any_order else (IN_ORDER,)
    narrowed = (*order, spacing(constraint))
    return Compiled("pushdown", payload, Enforcement(unenforced=unenforced, narrowed=narrowed))


def _rules(
    compiled: Callable[[bool], CompiledSchema], vocabulary: Vocabulary
) -> tuple[bytes, tuple[Unenforced, ...]]:
    """Compile the rules that ``compiled(True)`` returns. If the automaton cannot count their long
    repetitions, compile those of ``compiled(False)``, which have shorter repetitions. Returns the automaton
    and the keywords that its rules leave unenforced."""
    try:
        try:
            found = compiled(True)
            return compile_grammar(found.rules, vocabulary).to_bytes(), found.unenforced
        except NotCounted:
            found = compiled(False)
            return compile_grammar(found.rules, vocabulary, counting=False).to_bytes(), found.unenforced
    except TooLarge:
        raise Unenforceable(
            f"The constraint has more than {MAX_STATES} states with its repetitions written out.",
            pointer="",
            remedy="Use fewer or smaller repetitions, and fewer alternatives that begin alike.",
        ) from None


def _ebnf(source: str, vocabulary: Vocabulary) -> bytes:
    rules = CompiledSchema(without_left_recursion(grammar_rules(source)), ())
    return _rules(lambda counted: rules, vocabulary)[0]


def _structural_tag(constraint: Constraint, vocabulary: Vocabulary) -> Compiled:
    tag = parse_json(constraint.source)
    payload, unenforced = _rules(lambda counted: compile_tag(tag, counted=counted), vocabulary)
    return Compiled("pushdown", payload, Enforcement(unenforced=unenforced))


_COMPILERS: dict[Kind, Callable[[str, Vocabulary], bytes]] = {
    "regex": _regex,
    "choices": _choices,
    "ebnf": _ebnf,
}
