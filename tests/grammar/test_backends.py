"""XGrammar, llguidance and outlines-core as backends: their masks, what they refuse, what is told of them."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import CompileGrammar, GrammarFailed, GrammarReady
from ramify.errors import InvalidConstraint
from ramify.grammar.compile import keywords, policy
from ramify.grammar.compile.child_jobs import Answer, answer
from ramify.grammar.compile.child_limits import limit_memory
from ramify.grammar.compile.foreign import KINDS, Compiled
from ramify.grammar.compile.grammar_files import GrammarFiles
from ramify.grammar.compile.keywords import PACKAGES, Feature, Found
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.vocabulary import Vocabulary
from ramify.loop import wait
from tests.grammar.test_compile_jobs import EXPONENTIAL, job_of, run
from tests.grammar.vocabularies import (
    CONTROL,
    STOP,
    compiled,
    goes_through,
    mask_of,
    taken_back,
    takes,
    tiny,
    tokenise,
)

# XGrammar is imported in the first test that needs it, which takes seconds.
pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag"}
EXAMPLES: dict[str, tuple[Constraint, list[str], list[str]]] = {
    "json_schema": (
        constraint.json_schema(PERSON),
        ['{"name": "é", "age": 7}'],
        ['{"name": 1, "age": 7}', "{}"],
    ),
    "json_object": (constraint.json_object(), ["{}", '{"a": [1, null]}'], ["[]", '{"a"}']),
    "regex": (constraint.regex("[ab]{2,3}(?:é|日)?"), ["ab", "abbé", "aa日"], ["a", "abbbb", "é"]),
    "choices": (constraint.choices(["a b", 'c"\\', "日本"]), ["a b", 'c"\\', "日本"], ["a", "b"]),
    "ebnf": (constraint.ebnf('root ::= "a" | "(" root ")"'), ["a", "((a))"], ["(a", "b"]),
    "structural_tag": (
        constraint.structural_tag({"format": {"type": "const_string", "value": "ab"}} | TAG),
        ["ab"],
        ["a", "b"],
    ),
    "lark": (constraint.lark('start: "a" | "(" start ")"'), ["a", "((a))"], ["(a", "b"]),
}  # fmt: skip
PAIRS = [(backend, kind) for backend in PACKAGES for kind in EXAMPLES]
ABLE = [(backend, kind) for backend, kind in PAIRS if kind in KINDS[backend]]


@pytest.mark.parametrize(("backend", "kind"), ABLE)
def test_texts(backend: str, kind: str) -> None:
    wanted, inside, outside = EXAMPLES[kind]
    grammar = compiled(wanted, backend=backend)
    assert grammar.enforcement.backend == backend
    assert all(goes_through(grammar, text) for text in inside)
    assert not any(goes_through(grammar, text) for text in outside)


@pytest.mark.parametrize(("backend", "kind"), [pair for pair in PAIRS if pair not in ABLE])
def test_a_kind_that_a_backend_lacks_is_refused_by_name(backend: str, kind: str) -> None:
    with pytest.raises(InvalidConstraint, match=f"{backend} cannot do constraints of kind {kind}"):
        compile_constraint(EXAMPLES[kind][0], tiny(), backend)


@pytest.mark.parametrize(("backend", "kind"), ABLE)
@pytest.mark.parametrize("seed", range(4))
def test_a_matcher_keeps_its_promises(backend: str, kind: str, seed: int) -> None:
    grammar = compiled(EXAMPLES[kind][0], backend=backend)
    fresh = taken_back(grammar.matcher, random.Random(seed))
    allowed = mask_of(fresh, tiny())
    assert not allowed[CONTROL]
    assert allowed[STOP] == (fresh.complete and not fresh.finished)
    forced = fresh.forced_bytes()
    for token in range(tiny().size):
        spelled = tiny().tokens[token]
        if not forced or (spelled and (forced.startswith(spelled) or spelled.startswith(forced))):
            assert fresh.fork().accept(token) >= allowed[token]
        else:
            assert not allowed[token]


@pytest.mark.parametrize("backend", PACKAGES)
def test_text_that_is_forced_inside_a_character_and_prefixes(backend: str) -> None:
    matcher = compiled(constraint.regex("a(?:é|è)x"), backend=backend).matcher()
    assert matcher.forced_bytes() in (b"a", b"a\xc3")
    assert matcher.accept_bytes("aé".encode())
    assert matcher.forced_bytes() == b"x"
    matcher.rollback(1)
    assert matcher.accept_bytes("aèx".encode())
    assert matcher.accept(STOP)
    assert not matcher.accept_bytes(b"x")
    healed = compiled(constraint.regex("bc|d"), backend=backend).matcher(b"a")
    assert not healed.fork().accept(tokenise("b", tiny())[0])
    assert takes(healed, tokenise("abc", tiny()), tiny())
    assert healed.complete


@pytest.mark.parametrize("backend", PACKAGES)
def test_white_space(backend: str) -> None:
    compact = compiled(constraint.json_schema(PERSON, whitespace="compact"), backend=backend)
    assert goes_through(compact, '{"name":"a","age":1}')
    assert not goes_through(compact, '{"name": "a","age":1}')
    loose = compiled(constraint.json_schema(PERSON, whitespace=2), backend=backend)
    assert goes_through(loose, '{"name":  "a" ,"age":1}')
    assert not goes_through(loose, '{"name":   "a","age":1}')


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.mark.parametrize("backend", PACKAGES)
def test_what_a_backend_does_not_enforce_is_refused_or_told(backend: str) -> None:
    with pytest.raises(Unenforceable) as error:
        compile_constraint(constraint.json_schema(UNIQUE), tiny(), backend)
    assert error.value.pointer in ("/type", "/uniqueItems")
    assert error.value.remedy
    widened = compiled(constraint.json_schema(UNIQUE, strict=False), backend=backend)
    assert "/uniqueItems" in [left.schema for left in widened.enforcement.unenforced]
    assert goes_through(widened, "[1, 1]")
    told = widened.enforcement.fields()
    assert told["grammar_backend"] == backend
    assert told["may_be_cut"] == (backend != "outlines")
    assert told["narrowed"][0].startswith("White space: ")


def test_our_own_grammars_tell_nothing_that_the_pages_do_not_say() -> None:
    ours = compiled(constraint.json_schema(UNIQUE), backend="auto").enforcement
    assert (ours.backend, ours.unenforced, ours.whole, ours.fields()) == ("ramify", (), True, {})
    assert len(ours.narrowed) == 2


REASONS = {
    "xgrammar": (constraint.regex("[z-a]"), "lower bound is larger than upper bound"),
    "llguidance": (constraint.regex("a("), "unclosed group"),
    "outlines": (
        constraint.json_schema({"type": "object", "properties": {"a": {"not": {}}}}, strict=False),
        'Unsupported JSON Schema structure {"not":{}}',
    ),
}


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_refusal_quotes_the_reason_and_has_a_remedy(backend: str) -> None:
    wanted, reason = REASONS[backend]
    with pytest.raises(InvalidConstraint) as error:
        compile_constraint(wanted, tiny(), backend)
    assert reason in error.value.message
    assert error.value.remedy
    assert error.value.pointer == ("/properties/a" if backend == "outlines" else None)


def test_schemas_in_a_structural_tag_are_looked_through() -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": UNIQUE}}
    with pytest.raises(Unenforceable) as error:
        compile_constraint(constraint.structural_tag(tag), tiny(), "xgrammar")
    assert error.value.pointer == "/format/json_schema/uniqueItems"


@pytest.mark.parametrize("backend", PACKAGES)
def test_any_order_is_refused_by_name(backend: str) -> None:
    with pytest.raises(InvalidConstraint, match="any_order"):
        compile_constraint(constraint.json_schema(PERSON, any_order=True), tiny(), backend)


def test_ours_has_no_lark_notation() -> None:
    with pytest.raises(InvalidConstraint, match="Ramify's own engine cannot do constraints of kind lark"):
        compile_constraint(EXAMPLES["lark"][0], tiny(), "ramify")


# --- auto ---------------------------------------------------------------------------------------------

TOO_MANY = {"type": "array", "items": {"type": "boolean"}, "minItems": 10**9}
"""Beyond our own engine, and beyond every other with whole answers."""
OURS = policy._json


def enforced(*features: str) -> dict[str, Found]:
    """A table in which outlines-core enforces these features exactly."""
    return {"outlines": Found("1", {name: Feature("enforced", 9) for name in features})}


def refuse_two_letters(wanted: Constraint, vocabulary: Vocabulary) -> Compiled:
    if "maxLength" in wanted.source:
        raise Unenforceable("Ours cannot.", pointer="/maxLength", remedy="Leave it out.")
    return OURS(wanted, vocabulary)


def test_auto_hands_a_schema_on_that_a_backend_with_whole_answers_enforces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "_json", refuse_two_letters)
    monkeypatch.setattr(keywords, "table", lambda: enforced("type string", "maxLength"))
    short = {"type": "string", "maxLength": 2}
    handed_on = compiled(constraint.json_schema(short), backend="auto").enforcement
    assert (handed_on.backend, handed_on.whole) == ("outlines", True)
    with pytest.raises(Unenforceable, match="Ours cannot"):  # the pattern is large: it might take long
        compile_constraint(constraint.json_schema(short | {"maxLength": 10**6}), tiny(), "auto")


@pytest.mark.parametrize("unforeseen", [ValueError("?"), MemoryError(), RecursionError(), ImportError("no")])
def test_auto_keeps_the_refusal_whatever_fails(
    unforeseen: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Compiled:
        raise unforeseen

    monkeypatch.setattr(policy, "compile_foreign", fail)
    with pytest.raises(Unenforceable) as error:
        compile_constraint(constraint.json_schema(TOO_MANY), tiny(), "auto")
    assert error.value.pointer == "/minItems"


@pytest.mark.parametrize("multiple", [5003, 1000003])
def test_auto_hands_nothing_to_a_backend_whose_answers_may_be_cut(multiple: int) -> None:
    wanted = constraint.json_schema({"type": "integer", "multipleOf": multiple})
    with pytest.raises(Unenforceable) as error:
        compile_constraint(wanted, tiny(), "auto")
    assert error.value.pointer == "/multipleOf"


@pytest.mark.parametrize("feature", [Feature("widened"), Feature("unknown"), Feature("enforced", 9, True)])
def test_auto_keeps_the_refusal_otherwise(feature: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    found = enforced("type array", "type boolean", "items")
    found["outlines"].features["minItems"] = feature
    monkeypatch.setattr(keywords, "table", lambda: found)
    with pytest.raises(Unenforceable) as error:
        compile_constraint(constraint.json_schema(TOO_MANY), tiny(), "auto")
    assert error.value.pointer == "/minItems"
    assert "not known" not in error.value.message


# --- processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "limit_gb"), [("outlines", 4.0), ("outlines", 0.2)])
def test_a_library_that_does_not_end_is_killed(backend: str, limit_gb: float) -> None:
    def compile_with(job: CompileGrammar) -> Answer:
        return answer(job, tiny(), backend)

    jobs = [job_of(EXPONENTIAL), job_of(constraint.choices(["a"]))]
    enter = partial(limit_memory, int(limit_gb * 2**30))
    by_key = {one.key: one for one in wait(run(jobs, compile_with, enter=enter, timeout_s=1.0))}
    failed = by_key[EXPONENTIAL.key]
    assert isinstance(failed, GrammarFailed)
    assert failed.error.code == "invalid_constraint"
    assert isinstance(by_key[jobs[1].key], GrammarReady)


# --- caches and data ----------------------------------------------------------------------------------


def test_files_of_other_backends_and_versions_are_not_read(tmp_path: Path) -> None:
    ready = GrammarReady(
        key="k",
        engine="e",
        payload=b"p",
        enforcement=compiled(EXAMPLES["regex"][0], backend="outlines").enforcement,
    )
    GrammarFiles(tiny(), tmp_path, backend="outlines").put(ready)
    assert GrammarFiles(tiny(), tmp_path, backend="outlines").get("k") == ready
    assert GrammarFiles(tiny(), tmp_path, backend="auto").get("k") is None
    newer = keywords.versions() | {"outlines": "99"}
    assert GrammarFiles(tiny(), tmp_path, backend="outlines", versions=newer).get("k") is None


def test_the_table_is_of_the_versions_that_are_installed() -> None:
    assert {name: found.version for name, found in keywords.table().items()} == keywords.versions()


PLAIN = [
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {"type": "array", "items": {"type": "string", "minLength": 1}},
    PERSON,
]


@pytest.mark.parametrize("backend", PACKAGES)
def test_plain_schemas_are_served_and_told_to_be_narrowed(backend: str) -> None:
    enforcement = compiled(constraint.json_schema(PLAIN[0]), backend=backend).enforcement
    assert enforcement.unenforced == ()
    assert any(told.startswith("Objects have no other properties") for told in enforcement.narrowed) == (
        backend != "llguidance"
    )


def test_the_table_knows_what_common_schemas_need() -> None:
    for backend, found in keywords.table().items():
        for name in ("type object", "type string", "properties", "required", "enum", "items"):
            assert found.features[name].status == "enforced"
        for plain in PLAIN:
            assert keywords.unenforced(SchemaDocument(plain), backend) == ()
        left_out = keywords.unenforced(SchemaDocument(UNIQUE), backend)
        assert "/uniqueItems" in [left.schema for left in left_out]
    assert msgspec.json.decode(keywords.FILE.read_bytes())
