"""Retired words and banned phrases stay out of code, messages, help texts, metric names and docs.

``python -m tests.test_words PATH…`` prints the findings in tracked files below paths.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
KINDS = {".py", ".md", ".html", ".js", ".css", ".toml", ""}
EXCLUDED = {"tests/test_words.py", "docs/glossary.md", "docs/files.md", "CHANGELOG.md", "LICENSE"}
"""Files that are not searched: this one, the glossary of old words, a generated list, and the past."""
ALL = ("",)
RUNTIME = ("runtime/", "tests/runtime/")
GRAMMAR = ("grammar/", "tests/grammar/")
MOVES = ("runtime/fleet/", "runtime/frontend/", "runtime/kv_transfer/", "runtime/scheduler/")
SOURCE = ("ramify/", "lang/", "runtime/", "grammar/", "radix/", "kernels/", "benchmarks/", "examples/")
DOCS = ("docs/", "README.md")


class Banned(NamedTuple):
    """A regular expression that must not be found in files whose paths begin with one of `under`."""

    pattern: str
    instead: str
    under: tuple[str, ...] = ALL


def word(words: str) -> str:
    """A pattern of each word alone or as a part of a name in snake_case, CamelCase or CAPITALS."""
    some = words.split()
    lower, title, upper = ("|".join(map(form, some)) for form in (str.lower, str.title, str.upper))
    return (
        rf"(?<![A-Za-z])(?:{lower})(?![a-z])|(?<![A-Z])(?:{title})(?![a-z])"
        rf"|(?<![A-Za-z])(?:{upper})(?![A-Za-z])"
    )


def name(names: str) -> str:
    """A pattern of whole names."""
    return rf"\b(?:{'|'.join(names.split())})\b"


BANNED = (
    Banned(word("guess guesses guessed guessing"), "draft token, or speculative", (*SOURCE, *DOCS)),
    Banned(word("odds"), "acceptance rate"),
    Banned(word("ledger"), "counters"),
    Banned(word("desk"), "frontend", (*RUNTIME, *DOCS, "ramify/", "tests/server/")),
    Banned(word("growth"), "output appending", RUNTIME),
    Banned(word("lookahead"), "overlap scheduling", RUNTIME),
    Banned(word("stretch stretches"), "span", (*SOURCE, *DOCS)),
    Banned(word("forking"), "nondeterministic", GRAMMAR),
    Banned(word("fresh holder holders"), "unique items", ("grammar/",)),
    Banned(
        r"(?i)(?<![\w-])rings?(?![\w-])",
        "engine core",
        ("ramify/", "runtime/fleet/", "runtime/frontend/", "runtime/processes/", "runtime/server/"),
    ),
    Banned(
        name("Mover TreeTeller RingFleet RingSupervisor"),
        "KVConnector, ReplicaFleet, EngineSupervisor",
        SOURCE,
    ),
    Banned(word("image images"), "KV snapshot", ("ramify/ray/", "radix/", *MOVES)),
    Banned(word("members"), "replica set", ("ramify/ray/", "runtime/fleet/", "runtime/frontend/")),
    Banned(word("ward wards"), "isolation replica", (*SOURCE, *DOCS)),
    Banned(name("FrontDesk OutputGrowth FrameGrammar FrameMatcher"), "see docs/glossary.md"),
    Banned(r"\bso[\s#]+(?:many|much)\b", "state the quantity"),
    Banned(r"\bsuch[\s#]+a[\s#]+length\b", "state the length"),
    Banned(r"(?:[.!?:]\s|\"\"\"|[-*#] )(?:What of|Those that|Of what)\b", "name the noun"),
    Banned(r"\b(?:live|HTML|trace) pages?\b", "a page is of the KV cache: dashboard, or report"),
    Banned(r"\bruntime/worker\b(?!_)", "runtime/executor"),
)

NOUN_FIRST = re.compile(
    r"ramify/(?!ray/)|runtime/(server|engine|fleet|frontend|processes|kv_transfer)/|tests/(server/(?!fake_)|cli|end_to_end)"
)
"""Files whose docstrings begin with the noun that the thing is."""
RELATIVE = re.compile(r"(?:What|That of|Those|Whose|Which|Of)\b")


def tracked() -> list[str]:
    """The tracked text files, by their paths below the root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if Path(path).suffix in KINDS and path not in EXCLUDED]


def banned_in(path: str, text: str) -> Iterator[str]:
    for pattern, instead, under in BANNED:
        if path.startswith(under):
            for found in re.finditer(pattern, text):
                line = text.count("\n", 0, found.start()) + 1
                yield f"{path}:{line}: {found.group()!r}; {instead}"


def relative_docstrings(path: str, text: str) -> Iterator[str]:
    """Docstrings, those of fields included, that begin with a relative clause."""
    if not (path.endswith(".py") and NOUN_FIRST.match(path)):
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(said))) if RELATIVE.match(said):
                yield f"{path}:{node.lineno}: {said[:60]!r}; begin with the noun"


def findings(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return [*banned_in(path, text), *banned_in(path, path), *relative_docstrings(path, text)]


def test_no_retired_words_and_no_banned_phrases() -> None:
    found = [finding for path in tracked() for finding in findings(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "lines"),
    [
        ("lang/a.py", "may_guess = GuessSource\nMAX_GUESSES = 1  # guesswork\n", [1, 1, 2]),
        ("lang/a.py", "growth\n", []),
        ("runtime/a.py", "growth\n", [1]),
        ("radix/a.py", "# It takes so\n# many. Those that wait.\n", [1, 2]),
        ("runtime/server/a.py", "string = 0\n# two rings (0001-restart-the-whole-engine-core.md)\n", [2]),
        ("ramify/a.py", '"""Whose it is."""\n', [1]),
    ],
)
def test_words_are_found(path: str, text: str, lines: list[int]) -> None:
    found = [*banned_in(path, text), *relative_docstrings(path, text)]
    assert [int(one.split(":")[1]) for one in found] == lines


if __name__ == "__main__":
    for path in tracked():
        if any(Path(path).is_relative_to(top) for top in sys.argv[1:]):
            print(*findings(path), sep="\n", end="")
