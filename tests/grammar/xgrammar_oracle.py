"""XGrammar as an oracle: our rules in its EBNF, and its own structural tags."""

from __future__ import annotations

import json
from collections.abc import Mapping

import xgrammar

from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Accepted,
    Alt,
    Call,
    Chars,
    Expression,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    accepted,
    alt,
    repeat,
    seq,
)
from ramify.grammar.rules.rule_set import reachable
from ramify.grammar.schema.compiler import schema_rules
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.vocabularies import tiny, tokenise

MAX_CHAIN = 256
"""Longest repetition of a choice that is written as a chain of rules, each with its own masks."""


class Oracle:
    """A grammar that decides whether a text is one of its sentences."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary

    def accepts(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(map(matcher.accept_token, tokenise(text, self._vocabulary))) and matcher.is_completed()


def through_xgrammar(schema: object) -> Oracle:
    """The rules of `schema` on XGrammar."""
    return of_rules(schema_rules(parse_json(json.dumps(schema))))


def of_rules(rules: Mapping[str, Expression]) -> Oracle:
    return of_source(write_grammar(rules))


def of_source(source: str) -> Oracle:
    return Oracle(_compiler().compile_grammar(source), tiny())


def of_structural_tag(tag: object) -> Oracle:
    return Oracle(_compiler().compile_structural_tag(json.dumps(tag)), tiny())


def tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """XGrammar's own view of the vocabulary."""
    return xgrammar.TokenizerInfo(
        list(vocabulary.tokens),
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.stop_ids),
    )


def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(tokenizer_info(tiny()), max_threads=1, cache_enabled=False)


def write_grammar(rules: Mapping[str, Expression]) -> str:
    """The grammar of `rules`, which must be productive and hold one called ``root``."""
    written = _with_recursive_loops(rules)
    return "\n".join(f"{name} ::= {_write(written[name])}" for name in reachable(written))


def _with_recursive_loops(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """`rules` with repetitions of a choice as recursive rules, or as a chain of rules.

    XGrammar takes 40 ms and more for a mask inside ``(a | b c)*``, and 0.03 ms inside
    ``r ::= "" | a r | b c r``, which is the same language.
    """
    loops: dict[tuple[Expression, int, int | None], Call] = {}
    states: dict[Accepted, Call] = {}
    bodies: dict[str, Expression] = {}

    def rewritten(expression: Expression) -> Expression:
        match expression:
            case Seq(parts):
                return seq(*map(rewritten, parts))
            case Alt(options):
                return alt(*map(rewritten, options))
            case Repeat(Alt() as item, low, high) if max(low, high or 0) <= MAX_CHAIN:
                return loop(rewritten(item), low, high)
            case Repeat(item, low, high):
                return repeat(rewritten(item), low, high)
            case Accepted():
                return state(expression)
        return expression

    def state(expression: Accepted) -> Expression:
        """A rule for each state of the automaton, from this one on."""
        if expression not in states:
            states[expression] = Call(f"state{len(states)}")
            steps = [
                seq(Chars(ranges), rewritten(accepted(expression.automaton, after)))
                for ranges, after in expression.automaton.edges[expression.state]
            ]
            ending = [EMPTY] if expression.automaton.final[expression.state] else []
            bodies[states[expression].rule] = alt(*ending, *steps)
        return states[expression]

    def loop(item: Expression, low: int, high: int | None) -> Expression:
        if high == 0:
            return EMPTY
        call = loops.get((item, low, high))
        if call is None:
            call = loops[item, low, high] = Call(f"loop{len(loops)}")
            rest = call if low == 0 and high is None else loop(item, max(0, low - 1), high and high - 1)
            once = item.options if isinstance(item, Alt) else (item,)
            bodies[call.rule] = alt(EMPTY if low == 0 else NOTHING, *(seq(each, rest) for each in once))
        return call

    return {name: rewritten(body) for name, body in rules.items()} | bodies


def _write(expression: Expression) -> str:
    match expression:
        case Text(literal):
            return '"' + "".join(map(_literal_char, literal)) + '"'
        case Chars(ranges):
            return "[" + "".join(_span(low, high) for low, high in ranges) + "]"
        case Call(rule):
            return rule
        case Repeat(item, low, high):
            return _atom(item) + _count(low, high)
        case UniqueItem():
            raise TypeError("Texts that must differ are beyond a context-free grammar.")
        case Seq(parts):
            return " ".join(_atom(part) if isinstance(part, Alt) else _write(part) for part in parts) or '""'
        case Alt(options):
            written = [_write(option) for option in options if option != EMPTY]
            return " | ".join(written) if len(written) == len(options) else " | ".join(['""', *written])


def _atom(expression: Expression) -> str:
    written = _write(expression)
    return written if isinstance(expression, Text | Chars | Call) else f"({written})"


def _count(low: int, high: int | None) -> str:
    match (low, high):
        case (0, None):
            return "*"
        case (1, None):
            return "+"
        case (0, 1):
            return "?"
    return f"{{{low},{'' if high is None else high}}}"


def _literal_char(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else _code_point(ord(char))


def _span(low: int, high: int) -> str:
    return _class_char(low) if low == high else f"{_class_char(low)}-{_class_char(high)}"


def _class_char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else _code_point(point)


def _code_point(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
