"""Structural tags in XGrammar's JSON form, as rules: free text with tags that contain constrained content.

Free text that must not contain a trigger, or that ends at the closing string of a tag, becomes an automaton
that searches for these strings (Aho and Corasick 1975). Each of its states is a rule. Formats that work on
tokens instead of text are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from ramify.errors import InvalidConstraint
from ramify.grammar.rules import gbnf, regex_syntax
from ramify.grammar.rules.expression import (
    EMPTY,
    NOTHING,
    Call,
    Expression,
    alt,
    chars,
    complement,
    optional,
    ranges_of,
    rebuilt,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.json_escapes import json_escaped
from ramify.grammar.rules.lark import lark_rules
from ramify.grammar.rules.left_recursion import without_left_recursion
from ramify.grammar.rules.rule_set import ROOT, Rules, productive
from ramify.grammar.schema.compiler import CompiledSchema, compile_schema
from ramify.grammar.schema.values.schema_grammar import Options
from ramify.json_text import escape
from ramify.messages import Unenforced

_FIELDS: dict[str, frozenset[str]] = {
    "const_string": frozenset(["value"]),
    "any_text": frozenset(["excludes"]),
    "json_schema": frozenset(["json_schema", "strict"]),
    "regex": frozenset(["pattern"]),
    "grammar": frozenset(["grammar"]),
    "lark": frozenset(["grammar"]),
    "json_string": frozenset(["content"]),
    "sequence": frozenset(["elements"]),
    "or": frozenset(["elements"]),
    "optional": frozenset(["content"]),
    "plus": frozenset(["content"]),
    "star": frozenset(["content"]),
    "repeat": frozenset(["content", "min", "max"]),
    "tag": frozenset(["begin", "content", "end"]),
    "triggered_tags": frozenset(["triggers", "tags", "at_least_one", "stop_after_first", "excludes"]),
    "tags_with_separator": frozenset(["tags", "separator", "at_least_one", "stop_after_first"]),
}

T = TypeVar("T")

Ends = tuple[str, ...]
"""The closing strings of the tag around a format. Any of them ends the format's free text. Empty at the top
level."""


def compile_tag(tag: Any, *, counted: bool = True) -> CompiledSchema:
    """The grammar of the texts that `tag` describes: its rules by name, and the keywords that schemas with
    ``"strict": false`` leave unenforced.

    `counted` is the option `schema_grammar.Options.counted` of the schemas in the tag.

    Takes ``{"type": "structural_tag", "format": …}`` and the older ``{"structures": […], "triggers": […]}``.
    Raises `InvalidConstraint` with the JSON pointer of the invalid or unsupported part.
    """
    if not isinstance(tag, dict):
        _refuse("", "A structural tag is a JSON object")
    builder = _TagRules(Options(counted=counted))
    if "structures" in tag:
        root = builder.format("/structures", _from_older(tag), ())
    else:
        _only(tag, "", {"type", "format"})
        if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
            _refuse("", 'A structural tag has the type "structural_tag" and a format')
        root = builder.format("/format", tag["format"], ())
    rules = productive({**builder.rules.bodies, ROOT: root})
    if not rules:
        _refuse("", "No text satisfies the structural tag")
    return CompiledSchema(rules, tuple(builder.unenforced))


def _from_older(tag: dict[str, Any]) -> dict[str, Any]:
    _only(tag, "", {"type", "structures", "triggers"})
    tags = []
    for i, structure in enumerate(_field(tag, "structures", "", list)):
        if not isinstance(structure, dict) or not {"begin", "schema", "end"} <= structure.keys():
            _refuse(f"/structures/{i}", "A structure has begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        tags.append({"begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _TagRules:
    """The rules of a tag: each format becomes an expression over `rules`. Free text inside a tag ends at the
    first closing string of the tag. The expression of the free text includes this closing string."""

    def __init__(self, options: Options) -> None:
        self.rules = Rules()
        self.unenforced: list[Unenforced] = []
        self._options = options

    def format(self, pointer: str, form: Any, ends: Ends) -> Expression:
        """The texts of `form`, each followed by one of `ends` unless `ends` is empty."""
        if not isinstance(form, dict):
            _refuse(pointer, "A format is a JSON object")
        kind = form.get("type")
        if kind not in _FIELDS:
            _refuse(f"{pointer}/type", f"The format {kind!r} is not supported")
        _only(form, pointer, {"type", *_FIELDS[kind]})
        match kind:
            case "any_text":
                return self._any_text(pointer, form, ends)
            case "triggered_tags":
                return self._triggered(pointer, form, ends)
            case "sequence":
                return self._sequence(pointer, form, ends)
            case "or":
                options = _items(form, "elements", pointer)
                return alt(*(self.format(at, option, ends) for at, option in options))
        return seq(self._plain(pointer, kind, form), _one_of(ends))

    def _plain(self, pointer: str, kind: str, form: dict[str, Any]) -> Expression:
        match kind:
            case "const_string":
                return text(_field(form, "value", pointer, str))
            case "json_schema":
                strict = _field(form, "strict", pointer, bool, True)
                return self._schema(f"{pointer}/json_schema", form.get("json_schema"), strict)
            case "regex":
                pattern = _field(form, "pattern", pointer, str)
                return _pointing(f"{pointer}/pattern", lambda: regex_syntax.full_match(pattern))
            case "grammar":
                return self._grammar(pointer, form, gbnf.grammar_rules)
            case "lark":
                return self._grammar(pointer, form, lark_rules)
            case "json_string":
                return self._json_string(pointer, form)
            case "tag":
                return self._tag(pointer, form)
            case "tags_with_separator":
                return self._separated(pointer, form)
        content = self._content(pointer, form, ())
        match kind:
            case "optional":
                return optional(content)
            case "plus":
                return repeat(content, 1, None)
            case "star":
                return repeat(content, 0, None)
        return repeat(content, *_counts(form, pointer))

    def _content(self, pointer: str, form: dict[str, Any], ends: Ends) -> Expression:
        if "content" not in form:
            _refuse(pointer, "This format has a content")
        return self.format(f"{pointer}/content", form["content"], ends)

    def _sequence(self, pointer: str, form: dict[str, Any], ends: Ends) -> Expression:
        elements = _items(form, "elements", pointer)
        last = len(elements) - 1
        parts = [self.format(at, item, ends if i == last else ()) for i, (at, item) in enumerate(elements)]
        return seq(*parts) if parts else _one_of(ends)

    # --- tags -------------------------------------------------------------------------------------

    def _tag(self, pointer: str, form: dict[str, Any], after_trigger: int = 0) -> Expression:
        """The texts of a tag, without the first `after_trigger` characters of its opening string."""
        begin = _field(form, "begin", pointer, str)
        end = form.get("end")
        ends = tuple(end) if isinstance(end, list) else (end,)
        if not ends or not all(isinstance(one, str) for one in ends):
            _refuse(f"{pointer}/end", "A tag ends with a string, or with one of several")
        content = self._content(pointer, form, tuple(dict.fromkeys(ends)))
        return self.rules.define(seq(text(begin[after_trigger:]), content))

    def _tags(self, pointer: str, form: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        tags = []
        for at, item in _items(form, "tags", pointer):
            if not isinstance(item, dict):
                _refuse(at, "A tag is a JSON object")
            _only(item, at, {"type", *_FIELDS["tag"]})
            if item.get("type", "tag") != "tag":
                _refuse(f"{at}/type", "Only tags stand here")
            tags.append((at, item))
        return tags

    def _separated(self, pointer: str, form: dict[str, Any]) -> Expression:
        tags = self._tags(pointer, form)
        one = self.rules.define(alt(*(self._tag(at, tag) for at, tag in tags)))
        more = seq(text(_field(form, "separator", pointer, str)), one)
        some = (
            one if _field(form, "stop_after_first", pointer, bool, False) else seq(one, repeat(more, 0, None))
        )
        return some if _field(form, "at_least_one", pointer, bool, False) else optional(some)

    def _triggered(self, pointer: str, form: dict[str, Any], ends: Ends) -> Expression:
        triggers = _strings(form, "triggers", pointer)
        if not triggers:
            _refuse(f"{pointer}/triggers", "There is at least one trigger")
        tags = self._tags(pointer, form)
        for at, tag in tags:
            if not any(_field(tag, "begin", at, str).startswith(trigger) for trigger in triggers):
                _refuse(f"{at}/begin", "The tag begins with none of the triggers")
        free = self.rules.reserve()
        after = _one_of(ends) if _field(form, "stop_after_first", pointer, bool, False) else free
        found: dict[str, Expression] = {
            trigger: seq(
                alt(
                    *(
                        self._tag(at, tag, len(trigger))
                        for at, tag in tags
                        if tag["begin"].startswith(trigger)
                    )
                ),
                after,
            )
            for trigger in triggers
        }
        found |= dict.fromkeys(_strings(form, "excludes", pointer), NOTHING)
        found |= dict.fromkeys(filter(None, ends), EMPTY)
        self.rules.set_body(free, self._free_text(pointer, found, may_stop=not any(ends)))
        if _field(form, "at_least_one", pointer, bool, False):
            return seq(alt(*(self._tag(at, tag) for at, tag in tags)), after)
        return free

    # --- free text --------------------------------------------------------------------------------

    def _any_text(self, pointer: str, form: dict[str, Any], ends: Ends) -> Expression:
        found: dict[str, Expression] = dict.fromkeys(_strings(form, "excludes", pointer), NOTHING)
        found |= dict.fromkeys(filter(None, ends), EMPTY)
        return self._free_text(pointer, found, may_stop=not any(ends))

    def _free_text(self, pointer: str, found: Mapping[str, Expression], *, may_stop: bool) -> Expression:
        """Text up to and including the first occurrence of a key of `found`, followed by the expression that
        `found` has for this key. With `may_stop`, also text that contains no key."""
        if "" in found:
            _refuse(pointer, "A trigger, or a text to be excluded, is not empty")
        nodes = _keyword_automaton(tuple(found))
        calls = [self.rules.reserve() for _ in nodes]
        for call, following in zip(calls, nodes, strict=True):
            options: list[Expression] = [EMPTY] if may_stop else []
            options.append(seq(chars(complement(ranges_of(following))), calls[0]))
            for char, (node, keys) in following.items():
                after: Expression = calls[node]
                if keys:
                    # An excluded string is excluded even if it is the end of another key.
                    outcomes = [found[key] for key in keys]
                    after = NOTHING if NOTHING in outcomes else alt(*outcomes)
                options.append(seq(text(char), after))
            self.rules.set_body(call, alt(*options))
        return calls[0]

    # --- contents ---------------------------------------------------------------------------------

    def _schema(self, pointer: str, schema: Any, strict: bool) -> Expression:
        options = self._options._replace(strict=strict)
        compiled = _pointing(pointer, lambda: compile_schema(schema, options))
        self.unenforced += [
            msgspec.structs.replace(left, schema=pointer + left.schema) for left in compiled.unenforced
        ]
        return self._merged(compiled.rules)

    def _grammar(
        self, pointer: str, form: dict[str, Any], read: Callable[[str], dict[str, Expression]]
    ) -> Expression:
        source = _field(form, "grammar", pointer, str)
        return self._merged(_pointing(f"{pointer}/grammar", lambda: without_left_recursion(read(source))))

    def _json_string(self, pointer: str, form: dict[str, Any]) -> Expression:
        """The texts of the content as they are written between the quotes of a JSON string."""
        inner = _TagRules(self._options)
        root = inner._content(pointer, form, ())
        rules = {**inner.rules.bodies, ROOT: root}
        return self._merged(
            _pointing(pointer, lambda: {name: json_escaped(body) for name, body in rules.items()})
        )

    def _merged(self, rules: Mapping[str, Expression]) -> Expression:
        """Add the rules of the grammar `rules` under new names. Returns a call of its root."""
        names = {name: self.rules.reserve() for name in rules}
        for name, body in rules.items():
            self.rules.set_body(names[name], _renamed(body, names))
        return names[ROOT]


def _renamed(expression: Expression, names: Mapping[str, Call]) -> Expression:
    if isinstance(expression, Call):
        return names[expression.rule]
    return rebuilt(expression, lambda part: _renamed(part, names))


Node = dict[str, tuple[int, tuple[str, ...]]]
"""A node of the automaton: by character, the next node and the keywords that end with this character. All
other characters lead to node 0."""


def _keyword_automaton(keywords: Sequence[str]) -> list[Node]:
    """The automaton that finds the first occurrence of any of `keywords`; node 0 is the start."""
    goto: list[dict[str, int]] = [{}]
    ending: list[tuple[str, ...]] = [()]
    for keyword in keywords:
        node = 0
        for char in keyword:
            if char not in goto[node]:
                goto[node][char] = len(goto)
                goto.append({})
                ending.append(())
            node = goto[node][char]
        ending[node] = (*ending[node], keyword)
    # Breadth first: the fallback of a node is nearer to the start, so the fallback is completed first.
    complete: list[dict[str, int]] = [dict(goto[0])] + [{} for _ in goto[1:]]
    queue = deque((child, 0) for child in goto[0].values())
    while queue:
        node, fallback = queue.popleft()
        ending[node] += ending[fallback]
        complete[node] = complete[fallback] | goto[node]
        queue.extend((child, complete[fallback].get(char, 0)) for char, child in goto[node].items())
    return [
        {char: (child, tuple(dict.fromkeys(ending[child]))) for char, child in following.items()}
        for following in complete
    ]


# --- reading the JSON ---------------------------------------------------------------------------------


def _one_of(ends: Ends) -> Expression:
    return alt(*map(text, ends)) if ends else EMPTY


def _field(form: dict[str, Any], field: str, pointer: str, kind: type[T], default: T | None = None) -> T:
    """The value of a field, which must be of the type `kind`."""
    value = form.get(field, default)
    return value if type(value) is kind else _refuse(f"{pointer}/{field}", f"This is {_WORDS[kind]}")


_WORDS: dict[type, str] = {str: "a string", bool: "true or false", int: "a whole number", list: "an array"}


def _counts(form: dict[str, Any], pointer: str) -> tuple[int, int | None]:
    low, high = _field(form, "min", pointer, int, 0), _field(form, "max", pointer, int, -1)
    if low < 0 or (high != -1 and high < low):
        _refuse(f"{pointer}/min", "min is 0 or more, and max is at least min, or -1 for no limit")
    return low, None if high == -1 else high


def _pointing(pointer: str, make: Callable[[], T]) -> T:
    """The result of `make`. If `make` raises `InvalidConstraint`, the pointer of the error is put below
    `pointer`."""
    try:
        return make()
    except InvalidConstraint as error:
        raise InvalidConstraint(
            error.message, pointer=pointer + (error.pointer or ""), remedy=error.remedy
        ) from None


def _only(value: dict[str, Any], pointer: str, known: set[str]) -> None:
    for field in value:
        if field not in known:
            _refuse(f"{pointer}/{escape(field)}", f"The field {field!r} is not supported here")


def _items(form: dict[str, Any], field: str, pointer: str) -> list[tuple[str, Any]]:
    return [(f"{pointer}/{field}/{i}", item) for i, item in enumerate(_field(form, field, pointer, list))]


def _strings(form: dict[str, Any], field: str, pointer: str) -> list[str]:
    values = form.get(field) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        _refuse(f"{pointer}/{field}", "This is an array of strings")
    return values


def _refuse(pointer: str, message: str) -> NoReturn:
    raise InvalidConstraint(f"{message}.", pointer=pointer)
