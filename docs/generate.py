"""Writes docs/files.md from the docstrings of the code: ``python docs/generate.py``.

With ``--check`` it only compares, and exits with 1 if the file is out of date.
"""

from __future__ import annotations

import ast
from pathlib import Path

import generated_part

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "files.md"
BEGIN = "<!-- files: written by `make docs` from the first line of each file -->\n"
END = "<!-- /files -->"
FOLDERS = ("ramify", "lang", "grammar", "runtime", "radix", "kernels")


def table() -> str:
    """A list for each folder: the first line of its docstring, then a link and first line of each file."""
    parts = []
    for top in FOLDERS:
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            lines = [
                f"- [`{path.name}`](../{path.relative_to(ROOT)}): {first_line(path)}"
                for path in sorted(folder.glob("*.py"))
                if path.name != "__init__.py"
            ]
            if lines:
                package = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
                about = f" {first_line(folder / '__init__.py')}" if package else ""
                parts.append(f"**{folder.relative_to(ROOT)}/**{about}\n\n" + "\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring. Say in its first line what it is for.")
    return docstring.split("\n")[0]


if __name__ == "__main__":
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, table()))
