"""Writes the lists of flags in docs/command-line.md from the parsers: ``python docs/command_line.py``.

With ``--check`` it only compares, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import generated_part

from ramify.cli.main import COMMANDS, command_parser

PAGE = Path(__file__).parent / "command-line.md"
BEGIN = "<!-- flags: written by `make docs` from the parsers -->\n"
END = "<!-- /flags -->"


def section(command: str, listed: dict[tuple[str, str], str]) -> str:
    """The flags of a command, a table for each heading. `listed` maps (flag, help) to the command whose table
    has it already; such a flag is only named."""
    parser = command_parser(command)
    summary = f"{COMMANDS[command][:1].upper()}{COMMANDS[command][1:]}."
    lines = [f"## ramify {command}", "", summary, "", "```text"]
    lines += [line.strip() for line in (parser.usage or "").splitlines()]
    if parser.description != summary:
        lines += ["", parser.description or ""]
    lines += ["", parser.epilog, "```", ""] if parser.epilog else ["```", ""]
    again: dict[str, list[str]] = {}
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if isinstance(action, argparse._HelpAction):
                continue
            name, text = spelled(action), parser._get_formatter()._expand_help(action)
            first = listed.setdefault((name, text), command)
            if first == command or not action.option_strings:
                rows.append(f"| {name} | {cell(text)} |")
            else:
                again.setdefault(first, []).extend(f"`{flag}`" for flag in action.option_strings)
        if rows:
            lines += [f"**{group.title}**", "", "| | |", "| --- | --- |", *rows, ""]
    for first, names in again.items():
        lines += [f"As in [ramify {first}](#ramify-{first}): {', '.join(names)}.", ""]
    return "\n".join(lines)


def spelled(action: argparse.Action) -> str:
    """The names of a flag with its value, as code."""
    metavar = action.metavar or action.dest
    if action.choices:
        metavar = "{" + ",".join(action.choices) + "}"
    if not action.option_strings:
        return f"`{metavar}`"
    value = "" if action.nargs == 0 else f" {metavar}"
    return ", ".join(f"`{flag}{value}`" for flag in action.option_strings)


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def sections() -> str:
    listed: dict[tuple[str, str], str] = {}
    return "\n" + "\n".join(section(command, listed) for command in COMMANDS)


if __name__ == "__main__":
    raise SystemExit(generated_part.main(PAGE, BEGIN, END, sections()))
