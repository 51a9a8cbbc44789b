"""Learns from a chat template how a model thinks, by rendering conversations with thoughts in them.

Example, Qwen 3, whose template reads enable_thinking ("…" is ``<|im_start|>assistant\\n``, R are thoughts):

    generation prompt, thinking unset or on       …
    generation prompt, thinking off               …<think>\\n\\n</think>\\n\\n
    the last turn, with thoughts R, answer A      …<think>\\nR\\n</think>\\n\\nA
    the same turn before another user turn        …A

All four begin with the same text. `on`, `off` and the marks are read from the texts after it.
"""

from __future__ import annotations

import re
from typing import Any

from ramify.model_info import ChatFormat, ThinkingFormat
from ramify.runtime.model.tokenizer.tool_pieces import probe_call, probe_result, render
from ramify.tool_calls.parser import common_start

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off: Qwen and GLM use the first, DeepSeek the
second."""
CHANNEL = "<|channel|>analysis<|message|>"
"""The text that begins thoughts in gpt-oss."""
_USER, _ANSWER, _LATER, _THOUGHTS = "userword", "answerword", "laterword", "thoughtword"
_MARK = r"<[^<>]+>|\[[A-Z/]+\]|◁[^◁▷]+▷"
CUT = re.compile(r"(<[^<>]*|\[[A-Z/]*|◁[^◁▷]*)$")
"""Matches an incomplete mark at the end of a text."""
_START = re.compile(r"(<think>|<thinking>|◁think▷|\[THINK\])\s*$")
_ASKED = {"role": "user", "content": _USER}
_ANSWERED = {"role": "assistant", "content": _ANSWER}
_THOUGHT = {**_ANSWERED, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHTS)}
"""An assistant's message with thoughts, in each of the fields in which templates look for them."""
_CALL = probe_call("probed", 1)
_CALLED = {**_THOUGHT, "tool_calls": [_CALL]}
_RESULT = probe_result(_CALL, "resultword")
_ASKED_AGAIN = {"role": "user", "content": _LATER}


def thinking_format(tokenizer: Any, pieces: ChatFormat, source: str) -> ThinkingFormat | None:
    """How the model with the template `source` thinks; None if the template shows no sign of thinking."""

    def rendered(*turns: Any, generation: bool = True, **variables: Any) -> str:
        return render(tokenizer, turns, None, generation=generation, **variables) or ""

    def after_user(text: str) -> str:
        """The template's text after the first user turn."""
        return text.partition(_USER)[2].removeprefix(pieces.suffix["user"])

    switches = {name for name in SWITCHES if name in pieces.variables}
    unset = after_user(rendered(_ASKED))
    on = after_user(rendered(_ASKED, **dict.fromkeys(switches, True)))
    off = after_user(rendered(_ASKED, **dict.fromkeys(switches, False)))
    past = after_user(rendered(_ASKED, _ANSWERED, _ASKED_AGAIN)).partition(_ANSWER)[0]
    shown = after_user(rendered(_ASKED, _THOUGHT, generation=False))
    before, found, after = shown.partition(_THOUGHTS)
    before = before if found else on
    common = CUT.sub("", common_start([unset, on, past, before]))
    default, on, past, before = (text[len(common) :] for text in (unset, on, past, before))
    off = (
        off[off.rfind(common) + len(common) :] if common in off else default
    )  # GLM changes the user turn, too
    closed = re.match(rf"\s*({_MARK})", after.partition(_ANSWER)[0])
    opened = _START.search(before)
    if found and closed:
        end, gap = closed[1], after.partition(_ANSWER)[0][closed.end() :]
        start = before if not opened else before[opened.start() :]
        on = before
    elif opened:
        start = opened[0]
        end, gap = start.strip(), "\n\n" if start.endswith("\n") else ""
        end = f"{end[0]}/{end[1:]}"
    elif "</think>" in source:
        start, end, gap = "<think>\n", "</think>", "\n\n"
        on += start
    else:
        return None
    if not switches:
        off = past or (f"{start}\n{end}{gap}" if _START.search(default) else default)
    elif off.endswith(end):
        off += gap  # the model would write it
    kept = any(
        _THOUGHTS in rendered(_ASKED, {**_CALLED, "content": content}, _RESULT)
        for content in (_ANSWER, "")  # gpt-oss's takes thoughts or content beside a call, not both
    )
    channels = start == CHANNEL
    return ThinkingFormat(
        start=start,
        end=end,
        gap=gap,
        default=off if channels else default,
        on=on,
        off=off,
        past=past,
        channels=channels,
        kept=(
            "always" if _THOUGHTS in rendered(_ASKED, _THOUGHT, _ASKED_AGAIN) else "user" if kept else "turn"
        ),
    )
