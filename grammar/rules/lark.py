"""Grammars in Lark's notation as rules over characters.

    start: WORD ("," WORD)*        "start": WORD ("," WORD)*     rules
    WORD: /[a-z]+/                 "WORD": [a-z]+                terminals: rules without calls

Lark's grammars, as llguidance and OpenAI read them, are over tokens: a terminal takes as many characters as
some terminal that is allowed in its place can take. Rules over characters know no tokens. Both mean the same
texts where no terminal's text can go on into the terminal behind it (`_check_tokens`); other grammars are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.derivative import Derivatives, Residual
from ramify.grammar.rules.expression import (
    EMPTY,
    Alt,
    Call,
    Expression,
    Ranges,
    Repeat,
    Seq,
    Text,
    alt,
    chars,
    intersection,
    nullable,
    optional,
    parts_of,
    rebuilt,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.lark_patterns import common_terminal, lark_pattern
from ramify.grammar.rules.lark_words import LarkWord, lark_words
from ramify.grammar.rules.regex_syntax import MAX_REPEAT
from ramify.grammar.rules.rule_set import ROOT, calls_of, endless_rule, nullable_rules, productive
from ramify.text import shortened

START = "start"
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
"""An escape; the group is the number of one in hexadecimal, which JSON does not have."""
SKIPPED = "%ignore"
LATER = " later"

MAX_STATES = 20_000
"""Most pairs of states that `_check_tokens` visits for a terminal."""
MAX_INLINED = 4000
"""Most parts of terminals that are copied in place of calls, in a whole grammar. Terminals that call each
other twice double at each level."""
MAX_PAIRS = 1_000_000
"""Most pairs of terminals that `_check_tokens` compares. A million takes about 5 s."""


def lark_rules(source: str) -> dict[str, Expression]:
    """The rules of `source` by name, without rules that ``start`` does not need.

    Raises `InvalidConstraint`, with the line, for syntax that is not supported, and for grammars whose
    meaning depends on tokens.
    """
    rules, terminals, skipped = _Reader(source).read()
    named = endless_rule(rules, START)
    if named is not None:
        _refuse(f"its rule {named[0]!r} never ends", "Give it an alternative that ends.")
    rules[ROOT] = Call(START)
    if skipped:
        rules = _with_skipped(rules, terminals, repeat(alt(*skipped), 1, None))
        terminals |= {SKIPPED}
    rules = productive(rules)
    _check_tokens(rules, terminals & rules.keys())
    return rules


def _refuse(why: str, remedy: str | None = None) -> NoReturn:
    raise InvalidConstraint(f"The grammar cannot be used: {why}.", remedy=remedy)


# --- reading ------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._rules: dict[str, Expression] = {}
        self._terminals: dict[str, Expression] = {}
        self._skipped: list[Expression] = []
        self._called: dict[str, LarkWord] = {}
        self._whole: dict[str, Expression] = {}
        """Terminals without calls."""
        self._inlined_parts = 0
        self._in_terminal = False
        try:
            self._words = lark_words(source)
        except ValueError:
            self._words = []
            _refuse("the JSON value in it is not valid")

    def read(self) -> tuple[dict[str, Expression], set[str], list[Expression]]:
        """All rules with the terminals among them, the names of the terminals, and the ignored texts."""
        while self._at + 1 < len(self._words):
            word = self._words[self._at]
            if word.kind == "line":
                self._at += 1
            elif word.kind == "name":
                self._definition()
            elif self._take("%import"):
                self._import()
            elif self._take("%ignore"):
                self._skipped.append(self._terminal_body())
            else:
                self._fail(f"{word.text!r} is not supported here")
        for name, word in self._called.items():
            if name not in self._rules and name not in self._terminals:
                self._fail(f"the rule {name!r} is not defined", word)
        if START not in self._rules:
            _refuse("it has no rule named start", "Give the rule that it begins with that name: start: …")
        terminals = {name: self._inlined(name, ()) for name in self._terminals}
        skipped = [self._without_calls(body, ()) for body in self._skipped]
        return {**self._rules, **terminals}, set(terminals), skipped

    def _definition(self) -> None:
        word = self._words[self._at]
        self._at += 1
        name = _renamed(word.text.lstrip("!?"))
        if name in self._rules or name in self._terminals:
            self._fail(f"{name!r} is defined twice", word)
        if not self._take(":"):
            self._fail(f"a colon is expected, not {self._peek()!r}")
        if _is_terminal(name):
            self._terminals[name] = self._terminal_body()
        else:
            self._rules[name] = self._alternatives()
            self._end_line()

    def _terminal_body(self) -> Expression:
        self._in_terminal = True
        body = self._alternatives()
        self._in_terminal = False
        self._end_line()
        return body

    def _end_line(self) -> None:
        if self._words[self._at].kind != "line":
            self._fail(f"{self._peek()!r} is not supported here")

    def _import(self) -> None:
        if not self._take("common"):
            self._fail("only terminals of the module common can be imported")
        names = []
        if self._take("("):
            while not self._take(")"):
                names.append(self._next("name").text)
                self._take(",")
        elif self._take("."):
            names.append(self._next("name").text)
        renamed = self._next("name").text if self._take("->") else None
        for name in names:
            body = common_terminal(name)
            if body is None:
                self._fail(f"common has no terminal {name!r} that is supported")
            self._terminals[renamed or name] = body
        self._end_line()

    def _next(self, kind: str) -> LarkWord:
        word = self._words[self._at]
        if word.kind != kind:
            self._fail(f"a {kind} is expected, not {word.text!r}")
        self._at += 1
        return word

    def _inlined(self, name: str, around: tuple[str, ...]) -> Expression:
        if name in around:
            self._fail(f"the terminal {name!r} calls itself", self._called[name])
        if name not in self._whole:
            self._whole[name] = self._without_calls(self._terminals[name], (*around, name))
        return self._whole[name]

    def _without_calls(self, body: Expression, around: tuple[str, ...]) -> Expression:
        if isinstance(body, Call):
            if body.rule not in self._terminals:
                self._fail(f"a terminal cannot call the rule {body.rule!r}", self._called[body.rule])
            inlined = self._inlined(body.rule, around)
            self._inlined_parts += _count_parts(inlined)
            if self._inlined_parts > MAX_INLINED:
                why = (
                    f"its terminals have more than {MAX_INLINED} parts with those of the terminals they call"
                )
                self._fail(why, self._called[body.rule])
            return inlined
        return rebuilt(body, lambda part: self._without_calls(part, around))

    # --- expressions ----------------------------------------------------------------------------------

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._alternative_follows():
            options.append(self._sequence())
        return alt(*options)

    def _alternative_follows(self) -> bool:
        """Take a "|" in this line, or at the beginning of the next one."""
        following = self._words[self._at + 1 : self._at + 2]
        if self._words[self._at].kind == "line" and following and following[0].text == "|":
            self._at += 1
        return self._take("|")

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while self._words[self._at].kind != "line" and self._peek() not in (")", "]", "|"):
            if self._take("->"):
                self._next("name")
            else:
                parts.append(self._repeated(self._item()))
        return seq(*parts)

    def _item(self) -> Expression:
        word = self._words[self._at]
        self._at += 1
        match word.kind, word.text:
            case "sign", "(":
                return self._closed(")", word)
            case "sign", "[":
                return optional(self._closed("]", word))
            case "literal", literal:
                if self._take(".."):
                    return self._token(f"{literal}..{self._peek()}", self._range(word, self._next("literal")))
                return self._token(literal, self._literal(word))
            case "pattern", pattern:
                return self._token(pattern, self._pattern(word))
            case "name", name if name[0] not in "!?":
                self._called.setdefault(_renamed(name), word)
                return Call(_renamed(name))
        raise self._error(f"{word.text!r} is not supported here", word)

    def _closed(self, closing: str, opening: LarkWord) -> Expression:
        inner = self._alternatives()
        if not self._take(closing):
            self._fail(f"this {opening.text} is not closed", opening)
        return inner

    def _token(self, name: str, body: Expression) -> Expression:
        """`body` as a terminal of its own, unless it is a part of one."""
        if self._in_terminal or body == EMPTY:
            return body
        self._terminals[name] = body
        return Call(name)

    def _repeated(self, item: Expression) -> Expression:
        if self._take("*"):
            return repeat(item, 0, None)
        if self._take("+"):
            return repeat(item, 1, None)
        if self._take("?"):
            return optional(item)
        if self._take("~"):
            low = high = self._count()
            if self._take(".."):
                high = self._count(low)
            return repeat(item, low, high)
        if self._take("{"):
            low = 0 if self._peek() == "," else self._count()
            bound = low if not self._take(",") else None if self._peek() == "}" else self._count(low)
            if not self._take("}"):
                self._fail("a repetition is written {2}, {2,}, {,5} or {2,5}")
            return repeat(item, low, bound)
        return item

    def _count(self, least: int = 0) -> int:
        word = self._next("number")
        count = int(word.text) if len(word.text) <= 10 else None
        if count is None or not least <= count <= MAX_REPEAT:
            given = shortened(word.text, 20)
            self._fail(f"{given} is no count from {least} to {MAX_REPEAT}", word)
        return count

    def _literal(self, word: LarkWord) -> Expression:
        quoted = word.text.removesuffix("i")
        try:
            json_text = _ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], quoted)
            literal: str = json.loads(json_text, strict=False)
            literal.encode()
        except ValueError:
            self._fail(f"the literal {quoted} has an escape that is not supported", word)
        if quoted == word.text:
            return text(literal)
        return seq(*(lark_pattern(f"(?i)\\u{{{ord(char):x}}}") for char in literal))

    def _range(self, first: LarkWord, last: LarkWord) -> Expression:
        ends = [self._literal(word) for word in (first, last)]
        points = [ord(end.text) for end in ends if isinstance(end, Text) and len(end.text) == 1]
        if len(points) != 2 or points[0] > points[1]:
            self._fail("a range is between two characters", first)
        return chars([(points[0], points[1])])

    def _pattern(self, word: LarkWord) -> Expression:
        inside, _, flags = word.text[1:].rpartition("/")
        if unknown := sorted(set(flags) - set("isu")):
            self._fail(f"the flag {unknown[0]} of a pattern is not supported", word)
        flags = flags.replace("u", "")
        try:
            return lark_pattern(f"(?{flags}){inside}" if flags else inside)
        except InvalidConstraint as error:
            self._fail(f"in {word.text}: {error.message.rstrip('.')}", word)

    # --- words ----------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._words[self._at].text

    def _take(self, text: str) -> bool:
        found = self._peek() == text
        self._at += found
        return found

    def _error(self, why: str, word: LarkWord | None = None) -> InvalidConstraint:
        line = self._source.count("\n", 0, (word or self._words[self._at]).at) + 1
        return InvalidConstraint(f"The grammar, line {line}: {why}.")

    def _fail(self, why: str, word: LarkWord | None = None) -> NoReturn:
        raise self._error(why, word)


def _count_parts(expression: Expression) -> int:
    return 1 + sum(map(_count_parts, parts_of(expression)))


def _renamed(name: str) -> str:
    """The rule's name here: ``root`` is taken."""
    return "root " if name == ROOT else name


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


# --- ignored texts ------------------------------------------------------------------------------------


def _with_skipped(
    rules: Mapping[str, Expression], terminals: set[str], skipped: Expression
) -> dict[str, Expression]:
    """`rules` with `skipped` allowed between any two terminals.

    Each rule becomes two: its texts that are not empty, and, named with LATER, its texts behind a terminal.
    """
    empty = nullable_rules(rules)
    if found := sorted(terminals & empty):
        _refuse(f"it has %ignore, and its terminal {found[0]} may be empty", "Make the terminal optional.")

    def first(part: Expression) -> Expression:
        match part:
            case Alt(options):
                return alt(*map(first, options))
            case Seq(parts):
                begun = []
                for i, one in enumerate(parts):
                    begun.append(seq(first(one), *map(later, parts[i + 1 :])))
                    if not nullable(one, empty):
                        break
                return alt(*begun)
            case Repeat(item, low, high):
                least = 0 if nullable(item, empty) else max(0, low - 1)
                return seq(first(item), repeat(later(item), least, None if high is None else high - 1))
        return part

    def later(part: Expression) -> Expression:
        if isinstance(part, Call):
            return seq(optional(Call(SKIPPED)), part) if part.rule in terminals else Call(part.rule + LATER)
        return rebuilt(part, later)

    found_rules: dict[str, Expression] = {SKIPPED: skipped}
    for name, body in rules.items():
        found_rules[name] = body if name in terminals else first(body)
        if name not in terminals:
            found_rules[name + LATER] = later(body)
    if START in empty:
        found_rules[ROOT] = optional(found_rules[ROOT])
    return found_rules


# --- tokens -------------------------------------------------------------------------------------------


def _check_tokens(rules: Mapping[str, Expression], terminals: set[str]) -> None:
    """Refuse rules of which a text could be cut into terminals that end too early.

    Terminal W of letters, followed by "b": in "ab", W takes both letters, so no text of ``W "b"`` is read.
    For each terminal, the characters by which its text, or that of a terminal in the same place, can go on
    must not begin what follows.
    """
    first, after = _neighbours(rules, terminals)
    derivatives = Derivatives({})
    begins = {
        name: [ranges for ranges, _ in derivatives.product_transitions([frozenset([rules[name]])])]
        for name in terminals
    }
    places = {frozenset(first), *map(frozenset, after.values())}
    if sum(len(place) ** 2 for place in places) > MAX_PAIRS:
        _refuse(f"more than {MAX_PAIRS} pairs of its terminals may stand in the same place")
    for place in places:
        everything = frozenset(rules[name] for name in place)
        for name in place:
            longer = _longer(derivatives, rules[name], everything, name)
            for following in after[name]:
                if any(intersection(a, b) for a in longer for b in begins[following]):
                    _refuse(
                        f"{following} may follow {name}, and a text of both may also be a longer token",
                        "Write both as one terminal, or put a text between them that neither contains.",
                    )


def _longer(derivatives: Derivatives, own: Expression, everything: Residual, name: str) -> set[Ranges]:
    """The characters by which a text of `own` becomes the beginning of another text of `everything`."""
    found: set[Ranges] = set()
    start = (frozenset([own]), everything)
    seen = {start}
    queue = [start]
    for state in queue:
        for ranges, after in derivatives.product_transitions(state):
            if state is not start and any(map(derivatives.nullable, state[0])):
                found.add(ranges)
            if after[0] and after not in seen:
                if len(seen) == MAX_STATES:
                    _refuse(f"its terminal {name} has more than {MAX_STATES} states")
                seen.add((after[0], after[1]))
                queue.append((after[0], after[1]))
    return found


def _neighbours(rules: Mapping[str, Expression], terminals: set[str]) -> tuple[set[str], dict[str, set[str]]]:
    """The terminals with which a text may begin, and by terminal those that may follow it."""
    empty = nullable_rules(rules)
    first = {name: {name} & terminals for name in rules}
    last = {name: {name} & terminals for name in rules}
    after: dict[str, set[str]] = {name: set() for name in terminals}

    def ends(part: Expression) -> tuple[set[str], set[str]]:
        match part:
            case Call(rule):
                return first[rule], last[rule]
            case Alt(options):
                pairs = [ends(option) for option in options]
                return set().union(*(a for a, _ in pairs)), set().union(*(b for _, b in pairs))
            case Repeat(item, _, high):
                begin, end = ends(item)
                if high != 1:
                    follow(end, begin)
                return begin, end
            case Seq(parts):
                begins, before, begun = set[str](), set[str](), False
                for begin, end, may_be_empty in ((*ends(one), nullable(one, empty)) for one in parts):
                    follow(before, begin)
                    begins |= set() if begun else begin
                    before = before | end if may_be_empty else end
                    begun = begun or not may_be_empty
                return begins, before
        return set(), set()

    def follow(before: set[str], names: set[str]) -> None:
        for name in before:
            after[name] |= names

    callers: dict[str, list[str]] = {name: [] for name in rules}
    for name in rules.keys() - terminals:
        for called in calls_of(rules[name]):
            callers[called].append(name)
    # The last rule goes first: rules are mostly called by earlier ones.
    waiting = dict.fromkeys(name for name in rules if name not in terminals)
    while waiting:
        name, _ = waiting.popitem()
        begin, end = ends(rules[name])
        if not (begin <= first[name] and end <= last[name]):
            first[name], last[name] = first[name] | begin, last[name] | end
            waiting |= dict.fromkeys(callers[name])
    return first[ROOT], after
