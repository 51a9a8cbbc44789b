"""Objects whose members come in any order, against rules that list every order."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import Grammar, Matcher
from ramify.grammar.rules.expression import EMPTY
from ramify.grammar.schema.instance import validate
from ramify.grammar.schema.values.object_members import MemberSequence
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.vocabularies import accept_some, accepts, compiled, completion_of, mask_of, tiny

LEAVES: list[Any] = [{"const": 1}, {"type": "integer"}, {"type": "string"}, {"enum": ["a", "ab"]}, {}]
LEAVES += [{"type": "boolean"}, {"type": "array", "items": {"const": 0}}]
WORDS = ["name", "size", "n", "note", "no"]
NAMES = ["a", "ab", "b", "é", "n"]
WHITESPACE: list[Any] = ["natural", "natural", "compact", 1]


def listed(source: constraint.Constraint, vocabulary: Vocabulary) -> Grammar:
    """The grammar of rules that list every order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemberSequence, "_in_any_order", lambda self: (self._permuted(), EMPTY))
        return compiled(source, vocabulary)


class Objects:
    def __init__(self, chooser: random.Random) -> None:
        self._random = chooser

    def schema(self, depth: int) -> Any:
        chooser = self._random
        names = chooser.sample(NAMES, chooser.choice([1, 2, 2, 3, 3, 4]))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
        }
        if chooser.random() < 0.6:
            found["required"] = chooser.sample(names, chooser.randint(1, len(names)))
        others = chooser.choice([False, False, True, {"type": "integer"}])
        if others is not True:
            found["additionalProperties"] = others
        if chooser.random() < 0.3:
            found["minProperties"] = chooser.randint(1, 3)
        if chooser.random() < 0.3:
            found["maxProperties"] = chooser.randint(1, 4)
        if chooser.random() < 0.15:
            found["patternProperties"] = {"^[x-z]": {"type": "integer"}}
        if chooser.random() < 0.15:
            found["propertyNames"] = {"maxLength": chooser.randint(1, 3)}
        if len(names) > 1 and chooser.random() < 0.15:
            found["dependentRequired"] = {names[0]: [names[1]]}
        return found

    def _value(self, depth: int) -> Any:
        chooser = self._random
        if depth == 0 or chooser.random() < 0.6:
            return chooser.choice(LEAVES)
        kind = chooser.randrange(5)
        if kind == 0:
            return {"type": "array", "items": self.schema(depth - 1), "maxItems": 2}
        if kind == 1:
            return {"anyOf": [self.schema(depth - 1), self.schema(depth - 1)]}
        if kind == 2:
            return {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        if kind == 3:
            return {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
        return self.schema(depth - 1)


def walked(grammar: Grammar, other: Grammar, vocabulary: Vocabulary, seed: int, steps: int = 40) -> None:
    """On a random walk both have the same masks, ends and forced text, and completions of one are texts of
    both."""
    chooser = random.Random(seed)
    one, two = grammar.matcher(), other.matcher()
    said = b""
    for _ in range(steps):
        mask, wanted = mask_of(one, vocabulary), mask_of(two, vocabulary)
        differing = [(vocabulary.tokens[t], bool(mask[t])) for t in np.flatnonzero(mask != wanted)]
        assert not differing, (said, differing[:5])
        assert one.complete == two.complete
        forced = one.forced_bytes()
        assert forced == two.forced_bytes(), said
        check_completion(one, two, vocabulary)
        going_on = [int(token) for token in np.flatnonzero(mask) if vocabulary.tokens[token]]
        if not going_on:
            break
        # Members soon: text inside strings would be most of the walk.
        marked = [token for token in going_on if set(vocabulary.tokens[token]) & set(b'"{}[],:')]
        token = chooser.choice(marked if marked and chooser.random() < 0.7 else going_on)
        for matcher in (one, two):
            assert matcher.accept(token)
        said += vocabulary.tokens[token]


def check_completion(matcher: Matcher, other: Matcher, vocabulary: Vocabulary) -> None:
    """Under the smallest budget every choice ends in time, in a text that the other grammar allows too."""
    one, two = matcher.fork(), other.fork()
    while not one.complete:
        needed = one.completion_tokens
        assert needed is not None
        allowed = mask_of(one, vocabulary, needed)
        assert not (allowed & ~mask_of(one, vocabulary)).any()
        tokens = np.flatnonzero(allowed)
        assert tokens.size
        for token in tokens[:: max(1, tokens.size // 4)].tolist():
            after = one.fork()
            assert after.accept(token)
            assert (after.completion_tokens or 0) < needed
        token = int(tokens[0])
        assert one.accept(token)
        assert two.accept(token)
    assert two.complete


def check_budgets(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """A mask under a budget allows a token if and only if the matcher can end in time after it."""
    needed = matcher.completion_tokens
    assert needed is not None
    mask = mask_of(matcher, vocabulary)
    for budget in (needed, needed + 2):
        allowed = mask_of(matcher, vocabulary, budget)
        for token in np.flatnonzero(mask).tolist():
            after = matcher.fork()
            assert after.accept(token)
            in_time = after.finished or (after.completion_tokens or 0) < budget
            assert allowed[token] == in_time, (vocabulary.tokens[token], budget)


def small(chooser: random.Random) -> Vocabulary:
    """All bytes of the tests' texts, and tokens that span names, values and commas."""
    singles = sorted({bytes([byte]) for byte in '{}[]",: 019abenrutlsfxyzé\\'.encode()})
    pieces = ['{"', '": ', '", "', ', "', '"}', "}}", ': 1, "', '1, "a": 1', '"a": 1', '}, "', '"é', 'b": 1}']
    pieces += ['{"a":', ',"b"', "1}", '":1,"', 'b":1,"a', "true", "false", '{"a": 1, "b": 1}', '[{"', "null"]
    chosen = chooser.sample(pieces, 12)
    return Vocabulary((b"", *singles, *(piece.encode() for piece in chosen), b'\xc3\xa9"'), (0,))


def pair(schema: Any, chooser: random.Random, vocabulary: Vocabulary) -> tuple[Grammar, Grammar] | None:
    source = constraint.json_schema(schema, any_order=True, whitespace=chooser.choice(WHITESPACE))
    try:
        expected = listed(source, vocabulary)
    except InvalidConstraint:
        with pytest.raises(InvalidConstraint):
            compiled(source, vocabulary)
        return None
    return compiled(source, vocabulary), expected


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_all_orders(seed: int) -> None:
    chooser = random.Random(seed)
    for i in range(6):
        schema = Objects(chooser).schema(chooser.choice([0, 0, 1]))
        vocabulary = small(chooser)
        grammars = pair(schema, chooser, vocabulary)
        if grammars is None:
            continue
        try:
            for walk in range(3):
                walked(*grammars, vocabulary, seed=walk + 10 * i)
        except AssertionError:
            print(json.dumps(schema))
            raise


@pytest.mark.parametrize("seed", range(4))
def test_budgets_are_exact(seed: int) -> None:
    chooser = random.Random(100 + seed)
    for _ in range(5):
        schema = Objects(chooser).schema(1)
        vocabulary = small(chooser)
        source = constraint.json_schema(schema, any_order=True)
        try:
            grammar = compiled(source, vocabulary)
        except InvalidConstraint:
            continue
        assert isinstance(grammar, PushdownGrammar)
        matcher = grammar.matcher()
        for _ in range(25):
            check_budgets(matcher, vocabulary)
            if not accept_some(matcher, mask_of(matcher, vocabulary), vocabulary, chooser):
                break


def many(count: int, **more: Any) -> Any:
    """An object of `count` properties, every second one required."""
    words = itertools.cycle(WORDS)
    names = [f"{next(words)}{'_' if i % 3 else ''}{i}" for i in range(count)]
    leaves = [leaf for leaf in LEAVES if leaf]
    properties = {name: leaves[i % len(leaves)] for i, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names[::2], **more}


OF_LEAF = [1, 12, "text", "ab", True, [0, 0]]


@pytest.mark.parametrize("count", [100, 300])
@pytest.mark.parametrize("closed", [True, False])
def test_many_properties(count: int, closed: bool) -> None:
    schema = many(count, additionalProperties=False) if closed else many(count)
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    assert grammar.nbytes < 17 << 20
    chooser = random.Random(count)
    value = {name: OF_LEAF[i % len(OF_LEAF)] for i, name in enumerate(schema["properties"])}
    names = list(value)
    for _ in range(2):
        chooser.shuffle(names)
        members = [f"{json.dumps(name)}: {json.dumps(value[name])}" for name in names]
        assert accepts(grammar, "{" + ", ".join(members) + "}")
        assert accepts(grammar, "{" + ", ".join(m for m in members if name_of(m) in schema["required"]) + "}")
        assert not accepts(grammar, "{" + ", ".join(members[1:] + members[1:2]) + "}")
    missing = [m for m in members if name_of(m) != schema["required"][3]]
    assert not accepts(grammar, "{" + ", ".join(missing) + "}")
    assert accepts(grammar, "{" + ", ".join(['"other": 0', *members]) + "}") != closed


def name_of(member: str) -> str:
    name, _ = json.JSONDecoder().raw_decode(member)
    assert isinstance(name, str)
    return name


def test_the_smallest_budget_completes_many_properties() -> None:
    schema = many(100, additionalProperties=False, minProperties=60)
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b'{"no_49": 12, "n_47": ')
    tokens = completion_of(matcher, tiny())
    assert len(tokens) <= (matcher.completion_tokens or 0)
    text = b'{"no_49": 12, "n_47": ' + b"".join(tiny().tokens[token] for token in tokens)
    value = json.loads(text)
    assert validate(schema, value) == []
    assert len(value) == 60


def test_the_last_member_is_forced() -> None:
    schema = many(30, additionalProperties=False, minProperties=30)
    names = list(schema["properties"])
    values = [OF_LEAF[i % len(OF_LEAF)] for i in range(30)]
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in zip(names, values, strict=True)]
    last = members.pop(13)
    matcher = compiled(constraint.json_schema(schema, any_order=True)).matcher()
    assert matcher.accept_bytes(("{" + ", ".join(members)).encode())
    assert matcher.forced_bytes().startswith(b', "' + name_of(last).encode() + b'": ')


def test_rollback_fork_and_prefix() -> None:
    schema = many(20, additionalProperties=False)
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    whole = grammar.matcher(b"ab")
    plain = grammar.matcher()
    assert not whole.accept_bytes(b'ab{"x')
    assert whole.accept_bytes(b'ab{"name0": 1, "size_1": 1, ')
    assert plain.accept_bytes(b'{"name0": 1, "size_1": 1, ')
    assert (mask_of(whole, tiny()) == mask_of(plain, tiny())).all()
    twin = plain.fork()
    assert not plain.accept_bytes(b'"name0": ')
    assert plain.accept_bytes(b'"n_2": "x", ')
    assert not plain.accept_bytes(b'"n_2"')
    plain.rollback(1)
    assert plain.completion_tokens == twin.completion_tokens
    assert plain.accept_bytes(b'"n_2": "x", ')


def test_a_tree_of_objects() -> None:
    schema = {
        "properties": {name: {"$ref": "#"} for name in ("left", "right")} | {"key": {"type": "integer"}},
        "type": "object",
        "required": ["key"],
        "additionalProperties": False,
        "minProperties": 2,
    }
    with pytest.raises(InvalidConstraint, match="No JSON value"):
        compiled(constraint.json_schema(schema, any_order=True))
    del schema["minProperties"]
    grammar = compiled(constraint.json_schema(schema, any_order=True))
    leaf = '{"key": 1}'
    assert accepts(grammar, f'{{"right": {leaf}, "key": 2, "left": {{"left": {leaf}, "key": 0}}}}')
    assert not accepts(grammar, f'{{"right": {leaf}, "left": {leaf}}}')
    assert not accepts(grammar, f'{{"right": {leaf}, "key": 2, "right": {leaf}}}')
