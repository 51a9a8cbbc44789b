"""Writes docs/reference.md, the API reference, from signatures and docstrings: ``python docs/reference.py``.

With ``--check`` it only compares, and exits with 1 if the file is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generated_part

import ramify as rm
from ramify import errors
from ramify.cli.flags import field_docs
from ramify.lang.functions.function import Function
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.sampling_params import SamplingParams

PAGE = Path(__file__).parent / "reference.md"
BEGIN = "<!-- reference: written by `make docs` from the docstrings -->\n"
END = "<!-- /reference -->"
SECTIONS = {
    "Programs": "ramify.lang.functions|ramify.lang.state|ramify.lang.program|ramify.lang.api",
    "Decisions": "ramify.lang.decide|ramify.lang.typed",
    "Ready grammars": "ramify.lang$",
    "Tools": "ramify.lang.tools",
    "Batches": "ramify.lang.batch",
    "Backends": "ramify.lang.backends|ramify.runtime",
    "On a Ray cluster": "ramify$",
    "Choices of a select": "ramify.lang.calls",
    "Errors": "ramify.errors",
}
"""Title of a section → pattern of the modules whose public names it lists. Other names come last."""
MADE_FOR_USERS = (
    "Decision",
    "ModelDecision",
    "ForkGroup",
    "ProgramState",
    "Tool",
    "ToolCall",
    "BatchSummary",
    "Backend",
)
"""Classes that users do not construct."""
LONGEST_DEFAULT = 30
"""Most characters of a default value in a signature; a longer one is shown as "…"."""
HALVES = (
    "### `system_begin()`, `system_end()`, and so for `user`, `assistant`\n\n"
    "The two halves of a turn, as in SGLang.\n"
)


def page() -> str:
    parts: list[str] = []
    left = {name: module for name, module in rm._MODULES.items() if not name.endswith(("_begin", "_end"))}
    for title, pattern in SECTIONS.items():
        names = [name for name, module in left.items() if re.match(pattern, module)]
        for name in names:
            del left[name]
        parts.append(f"## {title}\n")
        parts += filter(None, map(entry, sorted(names, key=str.lower)))
        if title == "Programs":
            parts += [HALVES, entry_of("A program, made by `function`", Function)]
        if title == "Errors":
            parts.append(
                "```text\n" + inspect.cleandoc(errors.__doc__ or "").partition("\n\n")[2] + "\n```\n"
            )
    if left:
        parts += ["## Other names\n", *[entry(name) for name in sorted(left)]]
    parts += [
        "## Sampling options\n",
        "Of `gen`, `run` and `Engine.complete`. SGLang's spellings are taken as well (`gen`).\n",
        options(SamplingParams, dict(struct_docs())),
        "## Options of an engine\n",
        "Of `Engine(…)`, and with `--` and dashes of `ramify serve`, `run` and `chat`.\n",
        options(EngineConfig, dict(field_docs(EngineConfig))),
        "## Options of a server\n",
        "Of `ramify serve`, beside those of an engine.\n",
        options(ServerConfig, dict(field_docs(ServerConfig)), without=EngineConfig),
    ]
    return "\n" + "\n".join(parts) + "\n"


def entry(name: str) -> str:
    """The entry of one public name; for a class, its public methods and attributes too; for a module, its
    functions and classes."""
    found = getattr(rm, name)
    if inspect.ismodule(found):
        own = inspect.getmembers(found, lambda one: inspect.isfunction(one) or inspect.isclass(one))
        own = [(key, one) for key, one in own if one.__module__.startswith(found.__name__)]
        return "\n".join(entry_of(f"`{name}.{key}{signature(one)}`", one) for key, one in own)
    if inspect.isclass(found) and issubclass(found, rm.RamifyError):
        # An error that is told apart by its place in the tree alone has no docstring of its own.
        return f"### `{name}`\n\n{markdown(found)}\n" if "__doc__" in vars(found) and found.__doc__ else ""
    shown = "" if name in MADE_FOR_USERS else signature(found)
    return entry_of(f"`{name}{shown}`", found)


def entry_of(title: str, found: Any) -> str:
    parts = [f"### {title}\n\n{markdown(found)}\n"]
    if inspect.isclass(found):
        parts += [f"- {line}\n" for line in members(found)]
    return "\n".join(parts)


def members(kind: type[Any]) -> Iterator[str]:
    """Yield public methods and attributes of `kind`, except those that every backend has for programs."""
    known = {} if kind is rm.Backend else {**vars(rm.Backend), "await_tools": None, "submit_program": None}
    classes = [one for one in kind.__mro__ if one.__module__.startswith("ramify.lang.functions")] or [kind]
    for name, found in {
        name: found for one in reversed(classes) for name, found in vars(one).items()
    }.items():
        if name.startswith("_") or name in known:
            continue
        if isinstance(found, property):
            title, about = name, found.fget
        elif callable(found) or isinstance(found, classmethod | staticmethod):
            about = inspect.unwrap(getattr(kind, name))
            title = name + signature(about, method=True)
        else:
            continue
        says = inspect.getdoc(about)
        if says and not says.startswith("Not supported"):
            yield f"**`{title}`** {textwrap.indent(markdown(about), '  ').strip()}"


def signature(found: Any, *, method: bool = False) -> str:
    """The parameters with their defaults. Types are left out, as docstrings describe the parameters."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return ""
    if method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    plain = [
        one.replace(annotation=inspect.Parameter.empty, default=short(one.default)) for one in parameters
    ]
    return re.sub(
        r"<[\w.]*?([\w]+)(?: object)?(?: at 0x\w+)?>",
        r"\1",
        str(inspect.Signature(plain)).replace("Ellipsis", "…"),
    )


def short(default: Any) -> Any:
    """`default` itself, or "…" if its text is longer than `LONGEST_DEFAULT`."""
    if default is inspect.Parameter.empty or len(repr(default)) <= LONGEST_DEFAULT or callable(default):
        return default
    return Ellipsis


def markdown(found: Any) -> str:
    """A docstring as Markdown: sections of arguments become lists."""
    text = inspect.getdoc(found)
    if not text:
        raise SystemExit(f"{found} is public and has no docstring.")
    lines: list[str] = []
    for block in text.replace("``", "`").split("\n\n"):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Parameters\n----------"):
            entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            for one in entries:
                names, _, says = one.partition(":")
                lines.append(f"- `{names.strip()}`: {' '.join(says.split())}")
            lines.append("")
        elif block.startswith("    ") or "\n    " in block or ">>>" in block or "----" in block:
            lines += ["```text", block, "```", ""]
        else:
            lines += [" ".join(block.split()), ""]
    return "\n".join(lines).rstrip()


def struct_docs() -> Iterator[tuple[str, str]]:
    """Yield (field, docstring) for the sampling options, a struct that `field_docs` does not read."""
    source = inspect.getsource(SamplingParams)
    for name, text in re.findall(r'^    (\w+): [^\n]+\n    """(.*?)"""', source, re.DOTALL | re.M):
        yield name, " ".join(text.split())


def options(kind: Any, docs: dict[str, str], without: type[Any] | None = None) -> str:
    """A table of fields, types, defaults and docstrings."""
    hints = typing.get_type_hints(kind)
    skipped = set(typing.get_type_hints(without)) if without is not None else set()
    defaults = (
        {
            field.name: field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in dataclasses.fields(kind)
        }
        if dataclasses.is_dataclass(kind)
        else {name: getattr(kind(), name) for name in kind.__struct_fields__}
    )
    rows = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for name, default in defaults.items():
        if name not in skipped:
            about = docs.get(name, "").replace("|", "\\|").replace("``", "`")
            rows.append(f"| `{name}` | {shown(hints[name])} | `{default!r}` | {about} |")
    return "\n".join(rows) + "\n"


def shown(hint: Any) -> str:
    """The type `hint` as Markdown code, without module names and without "| None"."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = text.replace("typing.", "").replace(" | None", "").replace("|", "\\|")
    return "`" + re.sub(r"Literal\[(.*)\]", r"\1", text) + "`"


if __name__ == "__main__":
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, page()))
