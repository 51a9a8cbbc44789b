"""Fills HTML templates with a title, with files of this folder, and with data."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

INCLUDE = re.compile(r"/\*include ([\w.]+)\*/")


def fill(template: str, title: str, parts: Mapping[str, str] | None = None) -> str:
    """`template` with the title inserted, each ``/*include name*/`` replaced by that file, and each key of
    `parts` by its value."""

    def include(found: re.Match[str]) -> str:
        return files(__package__).joinpath(found[1]).read_text(encoding="utf-8")

    text = INCLUDE.sub(include, template).replace("<!--TITLE-->", html.escape(title))
    for place, part in (parts or {}).items():
        text = text.replace(place, part)
    return text


def script(data: Any) -> str:
    """`data` as JSON in which nothing can end the script element around it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
