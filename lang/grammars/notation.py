"""Functions that write GBNF expressions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ramify.constraint import Constraint, ebnf


def quoted(text: str) -> str:
    """A literal that matches `text`."""
    return '"' + "".join(map(_spelled, text)) + '"'


def _spelled(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"


def either(*options: str) -> str:
    """The alternation of `options`, in parentheses if there are several; empty options are left out."""
    kept = [option for option in options if option]
    return kept[0] if len(kept) == 1 else f"({' | '.join(kept)})" if kept else ""


def texts(options: Iterable[str]) -> str:
    """An alternation of literals, one for each of `options`."""
    return either(*map(quoted, options))


def listed(item: str, separator: str = ", ") -> str:
    """A repetition: `item` once or more, with `separator` between the items."""
    return f"{item} ({quoted(separator)} {item})*"


def words_but(words: Collection[str], first: str, others: str, begun: str = "") -> str:
    """An expression for the rest of a word that begins with `begun` and is none of `words`. A word is one
    character of `first`, then any number of characters of `others`.

    For all words of the letters a and b except "ab":  "a" ("a" [ab]* | "b" [ab] [ab]*)? | "b" [ab]*
    """
    following = {word[len(begun)] for word in words if word.startswith(begun) and word != begun}
    free = "".join(char for char in (others if begun else first) if char not in following)
    options = [f"{_class(free)} {_class(others)}*" if free else ""]
    options += [f'"{char}" {words_but(words, first, others, begun + char)}' for char in sorted(following)]
    return either(*options) + ("?" if begun and begun not in words else "")


def _class(chars: str) -> str:
    runs: list[list[str]] = []
    for char in sorted(chars):
        if runs and ord(char) == ord(runs[-1][-1]) + 1:
            runs[-1] = [runs[-1][0], char]
        else:
            runs.append([char])
    return f"[{''.join('-'.join(run) for run in runs)}]"


def grammar(rules: Mapping[str, str]) -> Constraint:
    """The constraint of a GBNF grammar. `rules` maps names to expressions, and must have a rule ``root``."""
    return ebnf("".join(f"{name} ::= {body}\n" for name, body in rules.items()))
