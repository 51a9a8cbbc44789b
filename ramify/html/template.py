"""Fills HTML templates: title, included files of this folder, and data."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

INCLUDE = re.compile(r"/\*include ([\w.]+)\*/")


def fill(template: str, title: str, parts: Mapping[str, str] | None = None) -> str:
    """`template` with its title, its ``/*include name*/`` files, and each placeholder in `parts` replaced."""

    def include(found: re.Match[str]) -> str:
        return files(__package__).joinpath(found[1]).read_text(encoding="utf-8")

    text = INCLUDE.sub(include, template).replace("<!--TITLE-->", html.escape(title))
    for place, part in (parts or {}).items():
        text = text.replace(place, part)
    return text


def script(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
