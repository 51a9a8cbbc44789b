"""Takes a chat template apart into pieces that can be appended one turn at a time, by probing it.

It renders conversations whose contents are marker words. The text around the markers comes from the template.
`ramify.model_info.ChatFormat` explains the pieces. Example with ChatML, A and B being the contents:

    rendered                  <|im_start|>user\\n A <|im_end|>\\n <|im_start|>assistant\\n B <|im_end|>\\n
    prefix[">user"]           <|im_start|>user\\n        before the first turn
    suffix["user"]            <|im_end|>\\n             the common start of all texts after a user turn
    prefix["user>assistant"]  <|im_start|>assistant\\n   the rest of the text between these two turns

The pieces are then checked: composed, they must equal the template's own output (`_difference`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.model_info import ChatFormat
from ramify.runtime.model.tokenizer.thinking_format import CUT, thinking_format
from ramify.runtime.model.tokenizer.tool_pieces import (
    probe_call,
    probe_result,
    probe_tool,
    render,
    tool_pieces,
)
from ramify.tool_calls.formats import GENERIC, format_in
from ramify.tool_calls.parser import common_start

Turn = tuple[str, str]
"""(role, content)"""

_READ = """
    user; system user; user assistant; system user assistant; user assistant user;
    system user assistant user; user assistant tool; user assistant tool assistant;
    user assistant tool user; user assistant tool tool; user user; user assistant assistant;
    user system; user assistant system; system system; system assistant; assistant; assistant user;
    tool; system
"""
"""Conversations from which the pieces are read, the simplest first. If a template writes different texts
between the same two roles, the first text counts."""

_CHECKED = """
    user; user assistant; user assistant user; user assistant user assistant;
    user assistant user assistant user; user assistant user assistant user assistant;
    system user; system user assistant; system user assistant user;
    system user assistant user assistant; system user assistant user assistant user;
    user user; user assistant assistant user; user assistant tool; user assistant tool assistant
"""
"""Conversations on which the pieces must give the template's own output."""

_CONTENTS = (("alpha", "Beta two", "gamma."), ("", "", ""), (" a\n", "\n\nb  ", "<b>c</b>\t"))
"""Contents of the checked conversations: plain words, empty texts, and texts that a template changes if it
strips white space or handles markup."""


def chat_format(tokenizer: Any) -> ChatFormat | None:
    """The pieces of `tokenizer.chat_template`; None without a template, or if the template drops contents.

    `exact` is False if the composed pieces differ from the template's output, for instance because the
    template strips contents. If the template refuses two roles in succession, `prefix` has no key for them.
    """
    if not tokenizer.chat_template:
        return None
    first: dict[str, str] = {}  # by role: the text before the first content
    after: dict[str, list[str]] = defaultdict(list)  # by role: all texts that follow its content
    between: dict[str, str] = {}  # by "role>next role": the text between their contents
    generation: dict[str, str] = {}  # by role: the text after its content with a generation prompt
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

    # A turn may end in one of two marks with the same beginning: <|end|> and <|return|>.
    suffix = {role: CUT.sub("", common_start(texts)) for role, texts in after.items()}
    # A generation prompt overrides the text before past assistant turns.
    between |= {f"{role}>assistant": text for role, text in generation.items()}
    prefix = {f">{role}": text for role, text in first.items()}
    for key, text in between.items():
        prefix[key] = text[len(suffix[key.partition(">")[0]]) :]
    if not generation and prefix.get("user>assistant", "").isspace():
        prefix["user>assistant"] = ""  # without a generation prompt the model writes this white space itself
    found = ChatFormat(
        prefix=prefix, suffix=suffix, exact=True, tool_format="", variables=template_variables(tokenizer)
    )
    thinking = thinking_format(tokenizer, found, template_source(tokenizer))
    opened = thinking.default if thinking is not None and thinking.channels else ""
    if opened:
        for key in prefix:
            if key.endswith(">assistant"):
                prefix[key] = prefix[key].removesuffix(opened) + opened
    difference = _difference(tokenizer, found, prompts=bool(generation), opened=opened)
    found = ChatFormat(
        prefix=prefix,
        suffix=suffix,
        exact=not difference,
        difference=difference,
        tool_format=_tool_format(tokenizer),
        variables=found.variables,
        thinking=thinking,
        source=template_source(tokenizer),
    )
    return msgspec.structs.replace(found, tools=tool_pieces(tokenizer, found))


def _tool_format(tokenizer: Any) -> str:
    """The name of the template's format of tool calls. If the template does not render both calls and
    results, the name of `GENERIC`."""
    call = probe_call("probed", 1)
    turns = [
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        probe_result(call, "resultword"),
        {"role": "assistant", "content": "omega"},
        {"role": "user", "content": "beta"},
    ]
    text = render(tokenizer, turns, [probe_tool("probed", "markerword")], generation=True) or ""
    complete = "markerword" in text and "resultword" in text
    return format_in(text, "probed").name if complete else GENERIC.name


def template_source(tokenizer: Any) -> str:
    """The Jinja source of the chat template; of the template for tools if there are several."""
    template: str | dict[str, str] = tokenizer.chat_template
    if isinstance(template, str):
        return template
    return template.get("tool_use") or template.get("default", "")


def template_variables(tokenizer: Any) -> tuple[str, ...]:
    """Variables that the template reads, without messages, tools and those that transformers always sets."""
    import jinja2
    from jinja2 import meta

    # {% generation %} is an extension of transformers: it marks the assistant's tokens for training.
    source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template_source(tokenizer))
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except jinja2.TemplateSyntaxError:
        return ()  # rendering reports the error
    given = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "documents"}
    return tuple(sorted(meta.find_undeclared_variables(tree) - given - set(tokenizer.special_tokens_map)))


def compose(pieces: ChatFormat, turns: Sequence[Turn], *, generation: bool) -> str | None:
    """The conversation as text; None if a piece is missing. With `generation`, the beginning of an
    assistant's turn is appended."""
    text, previous = "", ""
    for role, content in turns:
        key = f"{previous}>{role}"
        if key not in pieces.prefix or role not in pieces.suffix:
            return None
        text += pieces.prefix[key] + content + pieces.suffix[role]
        previous = role
    return text + pieces.prefix.get(f"{previous}>assistant", "") if generation else text


def _difference(tokenizer: Any, pieces: ChatFormat, *, prompts: bool, opened: str) -> str:
    """The first conversation on which composed pieces and the template's output differ; "" if there is none.

    prompts : whether the template has a generation prompt. Then conversations that end in an assistant's turn
        are not compared, because they are never sent.
    opened : text that the pieces append to the template's generation prompt
    """
    for roles in _conversations(_CHECKED):
        for contents in _CONTENTS:
            turns = [(role, contents[index % len(contents)]) for index, role in enumerate(roles)]
            if prompts and roles[-1] == "assistant":
                continue
            rendered = _render(tokenizer, turns, generation=prompts)
            composed = compose(pieces, turns, generation=prompts)
            if rendered is not None and prompts:
                rendered += opened
            if rendered != composed:
                return f"{turns} is {rendered!r} by the template and {composed!r} in pieces"
    return ""


def _conversations(text: str) -> list[list[str]]:
    return [line.split() for line in text.split(";")]


def _render(tokenizer: Any, turns: Sequence[Turn], *, generation: bool) -> str | None:
    chat = [{"role": role, "content": content} for role, content in turns]
    return render(tokenizer, chat, None, generation=generation)


def _split(text: str | None, turns: Sequence[Turn]) -> list[str] | None:
    """The texts before, between and after the contents; None unless each content occurs once, in order."""
    if text is None:
        return None
    pieces = []
    for _, content in turns:
        before, found, text = text.partition(content)
        if not found or content in text:
            return None
        pieces.append(before)
    return [*pieces, text]
