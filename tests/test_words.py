"""Retired words and banned phrases stay out of code, messages, help texts, metric names and docs.

``python -m tests.test_words PATH…`` prints what is found in files, or below folders.
"""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
KINDS = {".py", ".md", ".html", ".js", ".css", ".toml", ""}
EXCLUDED = {"tests/test_words.py", "docs/glossary.md", "docs/files.md", "CHANGELOG.md", "LICENSE"}
"""Besides this file: the table of the old words, a list that is generated from the code, and the past."""
RUNTIME = ("runtime/", "tests/runtime/")
GRAMMAR = ("grammar/", "tests/grammar/")
KERNELS = ("kernels/", "tests/kernels/")
CODE = ("ramify/", "lang/", "radix/", "benchmarks/", "examples/", *RUNTIME, *KERNELS, "grammar/")
DOCS = ("docs/", "README.md")


class Retired(NamedTuple):
    """Words that are not used any more below the folders `under`."""

    words: str
    instead: str
    under: tuple[str, ...] = ("",)


WORDS = (
    Retired("guess guesses guessed guessing", "draft token, or speculative", (*CODE, *DOCS)),
    Retired("odds", "acceptance rate"),
    Retired("ledger", "counters"),
    Retired("desk", "frontend", (*RUNTIME, *DOCS, "ramify/", "tests/server/")),
    Retired("growth", "output appending", RUNTIME),
    Retired("lookahead", "overlap scheduling", RUNTIME),
    Retired("stretch stretches", "span", (*CODE, *DOCS)),
    Retired("forking", "nondeterministic", GRAMMAR),
    Retired("fresh holder holders", "unique items", ("grammar/",)),
)
"""Found as whole words of text, and as parts of names: `may_guess`, `GuessSource`, `MAX_GUESSES`."""

NAMES = (
    Retired("FrontDesk", "Frontend"),
    Retired("Growth", "OutputAppender"),
    Retired("Lookahead", "OverlapScheduling"),
    Retired("Waits", "ReuseIntervals"),
    Retired("Odds Track", "AcceptanceRates, RequestAcceptance"),
    Retired("Stretch", "ScoredSpan"),
    Retired("Frames", "PushdownAutomaton"),
    Retired("FrameGrammar", "PushdownGrammar"),
    Retired("FrameMatcher", "PushdownMatcher"),
    Retired("Hold", "PrefixLock"),
    Retired("Listed Fact Seen", "enum/const, assertion, evaluated", GRAMMAR),
    Retired("picked moved", "index_select, to_device", ("runtime/executor/", "runtime/scheduler/")),
    Retired("_OnItsWay _Told hang_up", "in_flight, event, close"),
)
"""Found as whole names in code, and between backticks in docs."""

PHRASES = (
    (r"\bso (?:many|much)\b", "state the quantity"),
    (r"\bsuch a length\b", "state the length"),
    (r"(?:^|[.!?:] |(?:^|\n) *[-*] )(?:What of|Those that|Of what)\b", "name the noun"),
    (r"\b(?:live|HTML|trace) pages?\b", "a page is of the KV cache: dashboard, or report"),
    (r"\bruntime/worker\b(?!_)", "runtime/executor"),
)
"""Not in docs, docstrings, comments, messages and help texts."""


class Found(NamedTuple):
    path: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}; {self.instead}"


def tracked() -> list[str]:
    """The tracked text files, by their paths below the root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if Path(path).suffix in KINDS and path not in EXCLUDED]


def forms(words: str) -> re.Pattern[str]:
    """Each word alone or as a part of a name in snake_case, CamelCase or CAPITALS."""
    some = words.split()
    lower, title, upper = ("|".join(map(form, some)) for form in (str.lower, str.title, str.upper))
    return re.compile(
        rf"(?<![A-Za-z])(?:{lower})(?![a-z])|(?<![A-Z])(?:{title})(?![a-z])"
        rf"|(?<![A-Za-z])(?:{upper})(?![A-Za-z])"
    )


PATTERNS = [(forms(retired.words), retired) for retired in WORDS]
NAMED = {name: retired for retired in NAMES for name in retired.words.split()}


def retired_words(path: str, text: str) -> Iterator[Found]:
    for pattern, retired in PATTERNS:
        if path.startswith(retired.under):
            if named := pattern.search(path):
                yield Found(path, 0, named.group(), retired.instead)
            for number, line in enumerate(text.split("\n"), 1):
                for found in pattern.finditer(line):
                    yield Found(path, number, found.group(), retired.instead)


def retired_names(path: str, text: str) -> Iterator[Found]:
    for number, name in names(path, text):
        retired = NAMED.get(name)
        if retired is not None and path.startswith((*retired.under, "docs/")):
            yield Found(path, number, name, retired.instead)


@functools.lru_cache(maxsize=1)
def tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def names(path: str, text: str) -> Iterator[tuple[int, str]]:
    if path.endswith(".py"):
        for token in tokens(text):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
    elif path.endswith(".md"):
        for number, line in enumerate(text.split("\n"), 1):
            for quoted in re.findall(r"`([^`]+)`", line):
                yield from ((number, name) for name in re.findall(r"\w+", quoted))


def banned_phrases(path: str, text: str) -> Iterator[Found]:
    for start, part in prose(path, text):
        flat = re.sub(r"[ \t]*\n[ \t]*(?=\S)(?![-*] )", " ", part)
        for pattern, instead in PHRASES:
            for found in re.finditer(pattern, flat, re.MULTILINE):
                words = found.group().strip()
                line = start + part[: part.find(words.split()[-1])].count("\n")
                yield Found(path, line, words, instead)


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph of a document; of code, each string and each block of comments.

    Of tests, which have data in their strings, docstrings and comments only.
    """
    if not path.endswith(".py"):
        number = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            yield number, paragraph
            number += paragraph.count("\n")
        return
    begins = True
    comments: list[str] = []
    first = 0
    for token in tokens(text):
        if token.type == tokenize.COMMENT:
            if not comments:
                first = token.start[0]
            comments.append(token.string.lstrip("# "))
            continue
        if token.type == tokenize.NL:
            continue
        if comments:
            yield first, "\n".join(comments)
            comments = []
        if token.type == tokenize.STRING and (begins or not path.startswith("tests/")):
            yield token.start[0], re.sub(r"^\w*['\"]{1,3}|['\"]{1,3}$", "", token.string)
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


CHECKS = (retired_words, retired_names, banned_phrases)


def found_in(paths: Sequence[str]) -> list[Found]:
    return [
        found
        for path in paths
        for check in CHECKS
        for found in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]


# --- tests --------------------------------------------------------------------------------------


def test_no_retired_words_and_no_banned_phrases() -> None:
    found = found_in(tracked())
    assert not found, "\n".join(map(str, found))


def test_words_are_found_in_every_form() -> None:
    text = "a guess\nmay_guess = GuessSource\nMAX_GUESSES = 1  # is it guesswork, Guessing?\n"
    assert [(one.line, one.text) for one in retired_words("lang/a.py", text)] == [
        (1, "guess"),
        (2, "guess"),
        (2, "Guess"),
        (3, "GUESSES"),
        (3, "Guessing"),
    ]
    assert not list(retired_words("lang/a.py", "growth\n"))
    assert [one.text for one in retired_words("runtime/odds.py", "")] == ["odds"]


def test_names_are_found_in_code_and_between_backticks() -> None:
    assert [one.line for one in retired_names("radix/a.py", '"Hold"\nHold = 1  # Hold\n')] == [2]
    assert [one.text for one in retired_names("docs/a.md", "Hold it: `Hold.private`")] == ["Hold"]


def test_phrases_are_found_across_lines_and_at_the_start_of_sentences() -> None:
    code = '"""One\n\nIt takes so\nmany."""\nx = "those that are: Those that"\n# a\n# b. What of it\n'
    assert [(one.line, one.text) for one in banned_phrases("lang/a.py", code)] == [
        (4, "so many"),
        (5, ": Those that"),
        (7, ". What of"),
    ]
    assert [one.line for one in banned_phrases("tests/a.py", code)] == [4, 7]
    assert [one.line for one in banned_phrases("docs/a.md", "a\n\n- b\n- Of what\n")] == [4]


if __name__ == "__main__":
    wanted = [Path(path) for path in sys.argv[1:]]
    for one in found_in(
        [path for path in tracked() if any(Path(path).is_relative_to(top) for top in wanted)]
    ):
        print(one)
