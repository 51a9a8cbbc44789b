"""Files of labelled questions: JSON lines.

    {"input": "It broke.", "label": true, "question": {"type": "predicate", "instructions": "A complaint?"}}

``input`` and ``question`` are as in a body of ``/v1/decisions``. The label of a
predicate is true or false, that of a choice one of its values, and that of a score the label or the number of
a level, counted from 0.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from ramify.errors import InvalidRequest, NotFound, RamifyError
from ramify.messages import Generate
from ramify.model_info import ChatFormat
from ramify.questions import Question
from ramify.runtime.server.decisions.questions import take_question
from ramify.runtime.server.decisions.state import take_input
from ramify.runtime.server.fields import Fields

STANDARD = "-"
"""The name that stands for standard input."""
SHOWN = 20
"""Most wrong lines that an error shows."""


class LabelledQuestion(NamedTuple):
    line: int
    """Number of the line, from 1 on."""
    state: Generate
    """A request without an id that has only a prompt or a chat."""
    question: Question
    label: int
    """Index of the right option."""

    @property
    def key(self) -> Hashable:
        """The same for equal states."""
        return self.state.prompt, self.state.chat


def read_file(path: str) -> bytes:
    if path == STANDARD:
        return sys.stdin.buffer.read()
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}.", field="file") from None


def labelled_questions(
    content: bytes, chat_format: ChatFormat | None, trained_layout: str = ""
) -> list[LabelledQuestion]:
    """The questions of a file, for a model with this chat format. Empty lines are left out.

    trained_layout : the layout that the states are written for; empty for one of other models

    Raises `InvalidRequest` that names all wrong lines, and for a file without questions.
    """
    found: list[LabelledQuestion] = []
    wrong: dict[int, RamifyError] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                found.append(_labelled_question(number, line, chat_format, trained_layout))
            except RamifyError as error:
                wrong[number] = error
    if wrong:
        raise wrong_lines(wrong)
    if not found:
        raise InvalidRequest("The file has no questions.", field="file")
    return found


def wrong_lines(errors: dict[int, RamifyError]) -> InvalidRequest:
    """One error for the errors of several lines, by their numbers."""
    shown = [f"line {number}: {errors[number]}" for number in sorted(errors)[:SHOWN]]
    if len(errors) > SHOWN:
        shown.append(f"… and {len(errors) - SHOWN} lines more")
    lines = "1 line is" if len(errors) == 1 else f"{len(errors)} lines are"
    return InvalidRequest("\n  ".join([f"{lines} wrong:", *shown]), field="file")


def _labelled_question(
    number: int, line: bytes, chat_format: ChatFormat | None, trained_layout: str
) -> LabelledQuestion:
    try:
        fields = Fields.parse(line)
    except InvalidRequest as error:
        reason = error.message.removeprefix("The body: ")
        raise InvalidRequest(f"It must be one JSON object: {reason}") from None
    state = take_input(fields, "", chat_format, trained_layout)
    question = fields.take_object("question")
    if question is None:
        raise InvalidRequest("question is missing.", field="question")
    asked = take_question(question)
    label: bool | int | str | None = fields.take("label", bool | int | str)
    fields.refuse_rest()
    if label is None:
        raise InvalidRequest("label is missing.", field="label")
    return LabelledQuestion(number, state, asked.question, _option(label, asked.question, asked.values))


def _option(label: bool | int | str, question: Question, values: Sequence[str | bool]) -> int:
    """Index of the option that `label` names."""
    match question.kind:
        case "predicate":
            named: list[bool | int | str] = [True, False]
        case "choice":
            named = list(values)
        case "score":
            named = list(values) if isinstance(label, str) else list(range(len(values)))
    for option, name in enumerate(named):
        if type(name) is type(label) and name == label:
            return option
    shown = ", ".join(map(repr, named[:8])) + (", …" if len(named) > 8 else "")
    raise InvalidRequest(f"label is {label!r}; the {question.kind} has {shown}.", field="label")
