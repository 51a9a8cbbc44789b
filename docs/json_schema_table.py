"""Writes the table of keywords in docs/json-schema.md from a run of the tests' schemas.

``python docs/json_schema_table.py``. With ``--check`` it only compares, and exits with 1 if the table
differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import generated_part

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ramify import constraint  # noqa: E402
from ramify.errors import InvalidConstraint  # noqa: E402
from ramify.grammar.compile import keywords  # noqa: E402
from ramify.grammar.compile.policy import compile_constraint  # noqa: E402
from ramify.grammar.engine.load import load_grammar  # noqa: E402
from ramify.grammar.schema.compiler import compile_schema  # noqa: E402
from ramify.grammar.schema.document.check import KEYWORDS  # noqa: E402
from ramify.grammar.schema.document.formats import FORMATS  # noqa: E402
from ramify.grammar.schema.document.json_values import parse_json  # noqa: E402
from ramify.grammar.schema.document.unenforceable import Unenforceable  # noqa: E402
from tests.grammar import keyword_cases  # noqa: E402
from tests.grammar.collection.cases import written  # noqa: E402
from tests.grammar.logic_cases import LOGIC_CASES  # noqa: E402
from tests.grammar.schema_order import in_schema_order  # noqa: E402
from tests.grammar.test_refusals import BAD_SCHEMAS  # noqa: E402
from tests.grammar.vocabularies import goes_through, tiny  # noqa: E402

PAGE = ROOT / "docs" / "json-schema.md"
BEGIN = "<!-- keywords: written by `python docs/json_schema_table.py` from a run of the tests' schemas -->\n"
END = "<!-- /keywords -->"


SUITE = [case for case in written() if case.style == "suite"]


class Tried(NamedTuple):
    """A compiled schema, and the numbers of instances that its grammar judges right and wrong."""

    keywords: frozenset[str]
    right: int
    wrong: int


def trials() -> Iterator[Tried]:
    known = [(*case,) for case in (keyword_cases.CASES | LOGIC_CASES).values()]
    known += [(case.schema, *case.instances) for case in SUITE]
    for schema, valid, invalid in known:
        try:
            compiled = compile_constraint(constraint.json_schema(schema), tiny())
        except InvalidConstraint:
            continue
        grammar = load_grammar(*compiled, tiny())
        counts = [0, 0]
        for wanted, instances in ((True, valid), (False, invalid)):
            for instance in instances:
                counts[goes_through(grammar, in_schema_order(schema, instance)) != wanted] += 1
        yield Tried(frozenset(keywords_of(schema)), *counts)


def keywords_of(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            yield keyword
            inner = value.values() if keyword in _MAPS and isinstance(value, dict) else [value]
            for child in inner:
                yield from keywords_of(child)
    elif isinstance(schema, list):
        for child in schema:
            yield from keywords_of(child)


_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}


def refusals() -> dict[str, list[str]]:
    """Keyword → the reasons for which it is refused in the tests' schemas."""
    found: dict[str, list[str]] = {}
    bad = [schema for schema, _, _ in BAD_SCHEMAS] + [case.schema for case in SUITE]
    for schema in bad:
        try:
            compile_schema(parse_json(json.dumps(schema)))
        except Unenforceable as error:
            keyword = (error.pointer or "").rpartition("/")[2]
            reasons = found.setdefault(keyword, [])
            reason = re.sub(r" \(position .*?\)", "", error.message)
            if keyword in KEYWORDS and reason not in reasons:
                reasons.append(reason)
        except InvalidConstraint:
            continue
    return found


def table() -> str:
    tried = list(trials())
    refused = refusals()
    lines = [
        "| keyword | | schemas | instances | refused, or checked afterwards |",
        "| --- " * 5 + "|",
    ]
    for keyword in sorted(KEYWORDS, key=str.lower):
        own = [trial for trial in tried if keyword in trial.keywords]
        wrong = sum(trial.wrong for trial in own)
        status = "enforced" if own and not wrong else f"{wrong} wrong" if own else "not tried"
        if status == "enforced" and keyword in refused:
            status = "in part"
        right = sum(trial.right for trial in own)
        reasons = " ".join(refused.get(keyword, ["-"]))
        lines.append(f"| `{keyword}` | {status} | {len(own)} | {right} | {reasons} |")
    lines += ["", "### Other backends", "", *other_backends()]
    formats = ", ".join(f"`{name}`" for name in FORMATS)
    return "\n" + "\n".join(lines) + f"\n\nFormats: {formats}.\n\n"


MARKS = {"enforced": "yes", "widened": "no", "refused": "refused", "unknown": "?"}


def other_backends() -> list[str]:
    """Markdown lines of `backend_keywords.json`: a line for each feature that a backend has."""
    found = keywords.table()
    versions = [f"{keywords.PACKAGES[name]} {one.version}" for name, one in found.items()]
    names = sorted(
        {name for one in found.values() for name in one.features if " | " not in name}, key=str.lower
    )
    lines = [f"| keyword | {' | '.join(versions)} |", "| --- " * (1 + len(found)) + "|"]
    for name in names:
        cells = [cell(one.features, name) for one in found.values()]
        if any(each.startswith(("yes", "no")) for each in cells):
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def cell(features: dict[str, keywords.Feature], name: str) -> str:
    own = features.get(name)
    if own is None:
        return "?"
    beside = [
        pair.partition(" | ")[2]
        for pair, one in features.items()
        if pair.startswith(f"{name} | ") and one.status == "widened"
    ]
    exceptions = f", not beside {', '.join(beside)}" if own.status == "enforced" and beside else ""
    return MARKS[own.status] + exceptions + (", narrowed" if own.narrowed else "")


if __name__ == "__main__":
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, table()))
