"""A chat template as pieces that can be appended one turn at a time, found by probing the template.

Conversations are rendered whose contents are marker words; the text between the markers is what the
template adds. `ramify.messages.ChatFormat` says what the pieces mean.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.messages import ChatFormat
from ramify.runtime.model.tokenizer.tool_pieces import tool_pieces
from ramify.tool_calls.formats import GENERIC, format_in

Turn = tuple[str, str]
"""(role, content)"""

_READ = """
    user; system user; user assistant; system user assistant; user assistant user;
    system user assistant user; user assistant tool; user assistant tool assistant;
    user assistant tool user; user assistant tool tool; user user; user assistant assistant;
    user system; user assistant system; system system; system assistant; assistant; assistant user;
    tool; system
"""
"""Conversations that the pieces are read from, the plainest first: where a template says different
things between the same two roles, the first counts."""

_CHECKED = """
    user; user assistant; user assistant user; user assistant user assistant;
    user assistant user assistant user; user assistant user assistant user assistant;
    system user; system user assistant; system user assistant user;
    system user assistant user assistant; system user assistant user assistant user;
    user user; user assistant assistant user; user assistant tool; user assistant tool assistant
"""
"""Conversations on which the pieces must give what the template gives."""

_CONTENTS = (("alpha", "Beta two", "gamma."), ("", "", ""), (" a\n", "\n\nb  ", "<b>c</b>\t"))
"""Plain words; nothing at all; and what a template that strips or looks for markup would change."""


def chat_format(tokenizer: Any) -> ChatFormat | None:
    """The pieces of `tokenizer.chat_template`; None where it has none or does not show its contents.

    `exact` is False where composing them differs from the template on a conversation that the
    template accepts, such as one whose contents it strips. An order of roles that the template
    refuses has no key.
    """
    if not tokenizer.chat_template:
        return None
    first: dict[str, str] = {}  # by role: what precedes the first content
    after: dict[str, list[str]] = defaultdict(list)  # by role: everything seen to follow its content
    between: dict[str, str] = {}  # by "role>next role": what lies between their contents
    generation: dict[str, str] = {}  # by role: what follows its content before the model answers
    for roles in _conversations(_READ):
        turns = [(role, f"marker{index}word") for index, role in enumerate(roles)]
        pieces = _split(_render(tokenizer, turns, generation=False), turns)
        if pieces is None:
            continue
        first.setdefault(roles[0], pieces[0])
        for index, (role, text) in enumerate(zip(roles, pieces[1:], strict=True)):
            after[role].append(text)
            if index + 1 < len(roles):
                between.setdefault(f"{role}>{roles[index + 1]}", text)
        prompted = _split(_render(tokenizer, turns, generation=True), turns)
        if prompted is not None and prompted != pieces:
            after[roles[-1]].append(prompted[-1])
            generation.setdefault(roles[-1], prompted[-1])
    if "user" not in first:
        return None

    suffix = {role: _common_start(texts) for role, texts in after.items()}
    # What the model answers to counts more than how its old answers are shown.
    between |= {f"{role}>assistant": text for role, text in generation.items()}
    prefix = {f">{role}": text for role, text in first.items()}
    for key, text in between.items():
        prefix[key] = text[len(suffix[key.partition(">")[0]]) :]
    if not generation and prefix.get("user>assistant", "").isspace():
        prefix["user>assistant"] = ""  # the template has the model write that blank itself
    found = ChatFormat(prefix=prefix, suffix=suffix, exact=True)
    difference = _difference(tokenizer, found, prompts=bool(generation))
    found = ChatFormat(
        prefix=prefix,
        suffix=suffix,
        exact=not difference,
        difference=difference,
        tool_format=_tool_format(tokenizer),
        variables=template_variables(tokenizer),
    )
    return msgspec.structs.replace(found, tools=tool_pieces(tokenizer, found))


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probed",
        "description": "markerword",
        "parameters": {"type": "object", "properties": {"key": {"type": "integer", "description": "A key."}}},
    },
}
_PROBE_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "alpha"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            # Mistral's templates insist on ids of nine characters.
            {"id": "a1b2c3d4e", "type": "function", "function": {"name": "probed", "arguments": {"key": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "probed", "content": "resultword"},
]


def _tool_format(tokenizer: Any) -> str:
    """The name of the format in which the template shows a call, if it shows the tools and results too."""
    try:
        text: str = tokenizer.apply_chat_template(
            [*_PROBE_CALL, {"role": "assistant", "content": "omega"}, {"role": "user", "content": "beta"}],
            tools=[_PROBE_TOOL],
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:
        return GENERIC.name
    shown = "markerword" in text and "resultword" in text
    return format_in(text, "probed").name if shown else GENERIC.name


def template_source(tokenizer: Any) -> str:
    """The Jinja source of the chat template, of the one for tools where there are several."""
    template: str | dict[str, str] = tokenizer.chat_template
    if isinstance(template, str):
        return template
    return template.get("tool_use") or template.get("default", "")


def template_variables(tokenizer: Any) -> tuple[str, ...]:
    """What the template reads beside the messages, the tools and what transformers gives every template."""
    import jinja2
    from jinja2 import meta

    # A tag of transformers' own, which marks the assistant's tokens for training.
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template_source(tokenizer))
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except jinja2.TemplateSyntaxError:
        return ()  # rendering will say so
    given = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "documents"}
    return tuple(sorted(meta.find_undeclared_variables(tree) - given - set(tokenizer.special_tokens_map)))


def compose(pieces: ChatFormat, turns: Sequence[Turn], *, generation: bool) -> str | None:
    """The conversation as text, up to where the assistant answers; None where a piece is missing."""
    text, previous = "", ""
    for role, content in turns:
        key = f"{previous}>{role}"
        if key not in pieces.prefix or role not in pieces.suffix:
            return None
        text += pieces.prefix[key] + content + pieces.suffix[role]
        previous = role
    return text + pieces.prefix.get(f"{previous}>assistant", "") if generation else text


def _difference(tokenizer: Any, pieces: ChatFormat, *, prompts: bool) -> str:
    """The first conversation on which the pieces are not what the template makes of it; empty for none.

    With `prompts` the template has a generation prompt, and what is compared are prompts: those are sent,
    while what ends in an assistant's turn is only ever shown.
    """
    for roles in _conversations(_CHECKED):
        for contents in _CONTENTS:
            turns = [(role, contents[index % len(contents)]) for index, role in enumerate(roles)]
            if prompts and roles[-1] == "assistant":
                continue
            rendered = _render(tokenizer, turns, generation=prompts)
            composed = compose(pieces, turns, generation=prompts)
            if rendered != composed:
                return f"{turns} is {rendered!r} by the template and {composed!r} in pieces"
    return ""


def _common_start(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)  # what these two share, everything between them shares
    length = next((at for at, char in enumerate(low) if char != high[at]), len(low))
    return low[:length]


def _conversations(text: str) -> list[list[str]]:
    return [line.split() for line in text.split(";")]


def _render(tokenizer: Any, turns: Sequence[Turn], *, generation: bool) -> str | None:
    """What the template makes of `turns`; None where it refuses them."""
    chat = [{"role": role, "content": content} for role, content in turns]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)
    except Exception:  # a template is a program of its own: it may fail in any way it likes
        return None
    return text


def _split(text: str | None, turns: Sequence[Turn]) -> list[str] | None:
    """The texts before, between and after the contents; None unless each shows exactly once, in order."""
    if text is None:
        return None
    pieces = []
    for _, content in turns:
        before, found, text = text.partition(content)
        if not found or content in text:
            return None
        pieces.append(before)
    return [*pieces, text]
