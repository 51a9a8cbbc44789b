"""One HTML file from a template: its title, the files it includes, and its data."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

INCLUDE = re.compile(r"/\*include ([\w.]+)\*/")


def fill(template: str, title: str, parts: Mapping[str, str] | None = None) -> str:
    """`template` with its title, the files of this folder that it includes, and `parts` in their places."""

    def include(found: re.Match[str]) -> str:
        return files(__package__).joinpath(found[1]).read_text(encoding="utf-8")

    text = INCLUDE.sub(include, template).replace("<!--TITLE-->", html.escape(title))
    for place, part in (parts or {}).items():
        text = text.replace(place, part)
    return text


def script(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
