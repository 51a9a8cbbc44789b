"""Trials of other grammar libraries: each keyword, on the tests' schemas.

A *trial* is a text that one library accepted or rejected, beside the features (`keywords.features`) that may
be the cause. An example, for a library that ignores `minLength` beside `pattern`:

    {"minLength": 2}                      "a" rejected    minLength, minLength | no type
    {"minLength": 2, "pattern": "^a"}     "a" accepted    minLength, minLength | pattern, …
    {"minLength": 2, "pattern": "b$"}     "b" accepted    minLength, minLength | pattern, …
    cause: `minLength | pattern`: the keyword was right without the other
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ramify import constraint
from ramify.errors import RamifyError
from ramify.grammar.compile.foreign import library_of
from ramify.grammar.compile.keywords import Feature, Found, Status, beside, features, versions
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.schema.document.check import REFERENCES, SchemaDocument
from ramify.grammar.schema.document.formats import FORMATS
from ramify.grammar.schema.document.json_values import as_decimals
from ramify.grammar.schema.instance import validate
from ramify.messages import Enforcement
from tests.grammar import keyword_cases
from tests.grammar.collection.cases import written
from tests.grammar.logic_cases import LOGIC_CASES
from tests.grammar.schema_order import in_schema_order
from tests.grammar.vocabularies import goes_through, tiny

SECONDS = 2
"""Most processor time that a library may take over one schema and its texts."""


MOST_PAIRS = 40


class Text(NamedTuple):
    """A text that a library is asked about. `causes`: by violated keyword, the features that may let it
    through; none for a valid text."""

    text: str
    causes: tuple[frozenset[str], ...] = ()


class Question(NamedTuple):
    """A schema, and its texts. `features`: those of all its subschemas, and their pairs."""

    schema: Any
    features: frozenset[str]
    texts: tuple[Text, ...]


def questions() -> Iterator[Question]:
    known = [(*case,) for case in (keyword_cases.CASES | LOGIC_CASES).values()]
    known += [(case.schema, *case.instances) for case in written()]
    known += [(schema, *instances) for schema, *instances in formats()]
    for schema, valid, invalid in known:
        try:
            yield question(schema, valid, invalid)
        except (RamifyError, RecursionError):
            continue


def formats() -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Each format with its examples, which may be valid, and with texts that are not."""
    wrong = ["", "x y", "-", "1", "a@", "12:", "2024-13-01", "::::", "%", "/~2", "{", "P", "T1"]
    for name in FORMATS:
        schema = {"type": "string", "format": name}
        yield schema, [], [text for text in wrong if validate(schema, text)]


def question(schema: Any, valid: Iterable[Any], invalid: Iterable[Any]) -> Question:
    document = SchemaDocument(as_decimals(schema))
    texts = [Text(in_schema_order(schema, instance)) for instance in valid]
    for instance in invalid:
        causes = tuple(causes_of(document, failure.schema) for failure in validate(schema, instance))
        if causes:
            texts.append(Text(in_schema_order(schema, instance), causes))
    found: set[str] = set()
    for pointer, subschema in document.subschemas.items():
        if isinstance(subschema, dict):
            found |= own_features(document.keywords(pointer))
    repeated = list(repetitions(document, schema, valid))
    return Question(schema, frozenset(found), (*texts, *repeated))


def own_features(subschema: Any) -> set[str]:
    return {name for own in features(subschema) for name in (own, *beside(subschema, own))}


def causes_of(
    document: SchemaDocument, pointer: str, met: frozenset[tuple[str, str]] = frozenset()
) -> frozenset[str]:
    """The features that may be at fault where a violation of the keyword at `pointer` is let through: those
    of the keyword, of what it holds, and of all that leads there, references as well."""
    steps = pointer.split("/")
    found: set[str] = set()
    for place, subschema in document.subschemas.items():
        for keyword in REFERENCES:
            if not isinstance(subschema, dict) or keyword not in subschema or (place, keyword) in met:
                continue
            target = document.target(place, keyword)
            if pointer.startswith(f"{target}/") and (target or keyword != "$ref"):
                found |= causes_of(document, f"{place}/{keyword}", met | {(place, keyword)})
    for i in range(1, len(steps)):
        parent, keyword = "/".join(steps[:i]), steps[i]
        subschema = document.subschemas.get(parent)
        if isinstance(subschema, dict):
            own = document.keywords(parent)
            asked = {"then": ("then", "if"), "else": ("else", "if")}.get(keyword, (keyword,))
            for feature, of_keyword in features(own).items():
                if of_keyword in asked:
                    found |= {feature, *beside(own, feature)}
    for below, subschema in document.subschemas.items():
        if below.startswith(pointer + "/") or below == pointer:
            found |= own_features(document.keywords(below)) if isinstance(subschema, dict) else set()
    return frozenset(found)


def repetitions(document: SchemaDocument, schema: Any, valid: Iterable[Any]) -> Iterator[Text]:
    """Objects with one of the schema's properties a second time, with a wrong value, which readers keep."""
    named = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(named, dict) or "$ref" in schema:
        return
    cause = frozenset({"properties", *beside(schema, "properties")})
    for instance in list(valid)[:3]:
        for name in [name for name in named if isinstance(instance, dict) and name in instance][:2]:
            for value in (None, 12345.5, "zz", [], {}, True):
                if validate(schema, instance | {name: value}):
                    text = in_schema_order(schema, instance)[:-1]
                    yield Text(f"{text}, {json.dumps(name)}: {json.dumps(value)}}}", (cause,))
                    break


# --- answers ------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """`accepted`: by text; None where the schema is refused."""

    accepted: list[bool] | None


def answer(backend: str, question: Question) -> Answer:
    """A library's answer, in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writing, json.dumps(_accepted(backend, question)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return Answer(json.loads(data) if data else None)


def _accepted(backend: str, question: Question) -> list[bool] | None:
    engine, compile_with = library_of(backend)
    try:
        payload = compile_with(constraint.json_schema(question.schema), tiny())
    except Exception:
        return None
    grammar = load_grammar(engine, payload, Enforcement(backend=backend), tiny())
    return [goes_through(grammar, text.text) for text in question.texts]


# --- causes -------------------------------------------------------------------------------------------


def found(backend: str, asked: list[Question], answers: list[Answer]) -> Found:
    """Findings about each feature from the answers."""
    wrong: list[frozenset[str]] = []
    tried: list[frozenset[str]] = []
    rejected: Counter[str] = Counter()
    refused: list[frozenset[str]] = []
    served: list[frozenset[str]] = []
    rejecting: list[frozenset[str]] = []
    everywhere: Counter[str] = Counter()
    for question, (accepted, *_) in zip(asked, answers, strict=True):
        everywhere.update(question.features)
        if accepted is None:
            refused.append(question.features)
            continue
        served.append(question.features)
        pairs = list(zip(question.texts, accepted, strict=True))
        valid = [taken for text, taken in pairs if not text.causes]
        if not all(valid):
            rejecting.append(question.features)
        for text, taken in pairs:
            if taken:
                for causes in text.causes:
                    tried.append(causes)
                    wrong.append(causes)
            elif len(text.causes) == 1 and any(valid or [True]):
                tried.append(text.causes[0])
                rejected.update(text.causes[0])
    widened = causes_among(wrong, tried)
    refusing = causes_among(refused, [question.features for question in asked])
    narrowing = causes_among(rejecting, served)
    known = {}
    for name in sorted({*everywhere}):
        is_pair = " | " in name
        if is_pair and name not in widened | narrowing:
            continue
        status: Status = "enforced" if rejected[name] > 1 else "refused" if name in refusing else "unknown"
        known[name] = Feature("widened" if name in widened else status, rejected[name], name in narrowing)
    return Found(versions()[backend], known)


def causes_among(events: list[frozenset[str]], trials: list[frozenset[str]]) -> set[str]:
    """The features that explain all events: again and again the one that went wrong in the largest share of
    its trials. Where that feature went wrong only beside a few others, and was right without them, these
    pairs are the causes. In the end, those that were right most often go if the others explain all events."""
    causes: set[str] = set()
    left = [names for names in events if names]
    tried = Counter(name for names in trials for name in names)
    while left:
        count = Counter(name for names in left for name in names)
        best = max(
            count, key=lambda name: (count[name] / max(1, tried[name]), " | " not in name, count[name], name)
        )
        own = [names for names in left if best in names]
        causes |= _pairs(best, own, trials, tried) or {best}
        left = [names for names in left if best not in names]
    wrong = Counter(name for names in events for name in names)
    for name in sorted(causes, key=lambda name: (wrong[name] / max(1, tried[name]), name)):
        if all(names & causes - {name} for names in events if name in names):
            causes.remove(name)
    return causes


def _pairs(
    single: str, own: list[frozenset[str]], trials: list[frozenset[str]], tried: Counter[str]
) -> set[str]:
    """At most MOST_PAIRS pairs of a feature that cover all `own` events, the largest share of wrong
    trials first; none where the feature was not tried without them."""
    chosen: set[str] = set()
    rest = own
    while rest and len(chosen) < MOST_PAIRS:
        beside_it = Counter(name for names in rest for name in names if name.startswith(f"{single} | "))
        if not beside_it:
            return set()
        chosen.add(max(beside_it, key=lambda name: (beside_it[name] / max(1, tried[name]), name)))
        rest = [names for names in rest if not names & chosen]
    without = sum(single in names and not names & chosen for names in trials)
    return set() if rest or without < 2 else chosen
