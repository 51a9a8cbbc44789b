"""Fragments of HTML for notebooks: escaped, of bounded size, without scripts and external files.

Colours are translucent, so that text is readable on light and on dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from ramify.text import shortened

FOLD = 1500
"""Number of characters of a text that are shown. Further characters are folded."""
MOST = 8000
"""Most characters of a text in a fragment, folded ones included."""

STYLE = (
    ".ramify{font:13px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    "max-width:1000px;text-align:left}"
    ".ramify .head{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline;margin:2px 0 6px}"
    ".ramify .head b{font-size:14px}"
    ".ramify .soft{opacity:.7;font-size:12px}"
    ".ramify .turn{margin:4px 0;padding:4px 10px 6px;border-left:3px solid rgba(128,128,128,.45);"
    "border-radius:0 6px 6px 0;background:rgba(128,128,128,.09)}"
    ".ramify .turn.assistant{border-left-color:rgba(64,132,214,.8)}"
    ".ramify .turn.system{border-left-color:rgba(150,100,200,.7)}"
    ".ramify .role{font-size:11px;opacity:.7;display:block}"
    ".ramify .text{white-space:pre-wrap;overflow-wrap:anywhere}"
    ".ramify mark{background:rgba(46,160,67,.24);color:inherit;border-radius:3px;padding:0 1px}"
    ".ramify .bad{margin:6px 0;padding:4px 10px;border-left:3px solid rgba(219,68,68,.9);"
    "border-radius:0 6px 6px 0;background:rgba(219,68,68,.13);white-space:pre-wrap;overflow-wrap:anywhere}"
    ".ramify summary{cursor:pointer;opacity:.8}"
    ".ramify table{border-collapse:collapse;margin:4px 0;border:0;font-size:12px}"
    ".ramify td,.ramify th{text-align:left;vertical-align:top;padding:2px 12px 2px 0;border:0;"
    "font-variant-numeric:tabular-nums;background:none;white-space:nowrap}"
    ".ramify td:last-child{white-space:normal;overflow-wrap:anywhere}"
    ".ramify tr{background:none;border-top:1px solid rgba(128,128,128,.22)}"
    ".ramify code,.ramify .mono{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "font-size:12px;background:none;color:inherit}"
    ".ramify ul.tree,.ramify ul.tree ul{list-style:none;margin:0;padding:0}"
    ".ramify ul.tree ul{margin-left:5px;padding-left:14px;border-left:1px solid rgba(128,128,128,.35)}"
    ".ramify ul.tree li{margin:0;padding:1px 0}"
    ".ramify ul.tree summary{opacity:1}"
    ".ramify ul.tree .leaf{padding-left:14px}"
    ".ramify ul.tree .said{margin:0 0 3px 14px}"
    ".ramify ul.tree .bad{margin:2px 0}"
    ".ramify .row{display:inline-flex;flex-wrap:wrap;gap:0 10px;align-items:baseline;width:calc(100% - 18px);"
    "font-variant-numeric:tabular-nums}"
    ".ramify .leaf .row{width:calc(100% - 4px)}"
    ".ramify .row .name{font-weight:600}"
    ".ramify .bar{flex:0 0 140px;margin-left:auto;height:3px;align-self:center;"
    "background:rgba(128,128,128,.18)}"
    ".ramify .bar span{display:block;height:3px;min-width:2px;background:rgba(64,132,214,.8)}"
)

Run = tuple[str, bool]
"""A text, and whether a model generated it."""


def fragment(parts: Iterable[str]) -> str:
    """One self-contained piece of HTML, with its style, made of `parts`, which are HTML."""
    return f'<div class="ramify"><style>{STYLE}</style>{"".join(parts)}</div>'


def tag(name: str, content: str, css: str = "") -> str:
    """The HTML element `name` with the HTML `content`. `css`: its classes."""
    attribute = f' class="{html.escape(css)}"' if css else ""
    return f"<{name}{attribute}>{content}</{name}>"


def escaped(text: object, most: int = FOLD) -> str:
    """`text` as HTML, cut after `most` characters."""
    return html.escape(shortened(str(text), most))


def head(title: str, *facts: str) -> str:
    """A line with a title and facts. Empty facts are left out."""
    return tag(
        "div",
        tag("b", escaped(title)) + "".join(tag("span", escaped(fact), "soft") for fact in facts if fact),
        "head",
    )


def table(rows: Iterable[Sequence[str]], names: Sequence[str] = ()) -> str:
    """A table. Its cells are HTML; `names` are the headings of the columns."""
    lines = [tag("tr", "".join(tag("th", escaped(name)) for name in names))] if names else []
    lines += [tag("tr", "".join(tag("td", cell) for cell in row)) for row in rows]
    return tag("table", "".join(lines))


def details(summary: str, content: str, *, open: bool = False) -> str:
    """The HTML `content`, folded under the text `summary`."""
    return f"<details{' open' if open else ''}><summary>{escaped(summary)}</summary>{content}</details>"


def text(runs: Iterable[Run], *, end: bool = False, fold: int = FOLD) -> str:
    """Text in which generated parts are marked.

    Characters beyond `fold` are folded; of those beyond `MOST` only the number is shown. With `end`, only the
    last `fold` characters are shown, and the number of those before.
    """
    listed = [run for run in runs if run[0]]
    total = sum(len(part) for part, _ in listed)
    if end and total > fold:
        left = tag("span", f"{total - fold:,} characters, then …", "soft")
        return tag("div", left + _spans(_cut(listed, total - fold, total)), "text")
    shown = _spans(_cut(listed, 0, fold))
    if total > fold:
        rest = _spans(_cut(listed, fold, MOST))
        if total > MOST:
            rest += tag("span", f" … and {total - MOST:,} characters that are not shown", "soft")
        shown += details(f"… {total - fold:,} more characters", rest)
    return tag("div", shown, "text")


def _cut(runs: Iterable[Run], start: int, end: int) -> Iterator[Run]:
    place = 0
    for part, generated in runs:
        yield part[max(start - place, 0) : max(end - place, 0)], generated
        place += len(part)


def _spans(runs: Iterable[Run]) -> str:
    return "".join(
        tag("mark", html.escape(part)) if generated else html.escape(part) for part, generated in runs if part
    )
