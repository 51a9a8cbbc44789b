"""Retries of a `gen`: the model is shown an invalid output and the error of that output, and generates again.

    assistant: Answer: {"age": "x"}            the invalid output ends its turn
    user: That is not valid. age: Input …      the correction
    assistant: Answer: {"age": 3}              a new turn, which begins like the first one

Outside of an assistant turn the correction is plain text. By default, once an output is valid, the branch
drops the failed attempts and their corrections, and continues as if the valid output had been the first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramify.errors import ProgramError
from ramify.lang.calls.request import Output
from ramify.lang.calls.session import Target
from ramify.lang.program.events import Retried
from ramify.lang.program.nodes import Gen
from ramify.lang.program.sending import send
from ramify.lang.prompt.chat import Content, begin_turn, end_turn
from ramify.lang.prompt.transcript import Piece, append_pieces, append_text, pieces
from ramify.lang.trace.calls import Call
from ramify.model_info import ModelInfo
from ramify.sampling_params import SamplingParams
from ramify.text import sentence, shortened

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch

CORRECTION = "That is not valid. {problem}\nGive the whole answer again, corrected."
PLAIN_CORRECTION = "\nThat is not valid. {problem}\nThe same again, corrected:\n"
"""The text after an invalid output outside of an assistant turn."""
MAX_PROBLEM = 600
"""Most characters of an error that the model is shown."""
MAX_SHOWN = 200


@dataclass(frozen=True)
class Attempted:
    """A valid output, its value, and the content of the branch before and after the output."""

    output: Output
    value: Any
    before: Content
    content: Content


async def attempt(
    branch: Branch, call: Call, target: Target, sampling: SamplingParams, step: Gen
) -> Attempted:
    """Generate until an output is valid, at most ``1 + step.retries`` times. `call` is the call of the step.
    Raises the error of the last output if none is valid."""
    content = branch.content
    dialogue = content.dialogue
    opening = pieces(content.tail, dialogue.start) if dialogue.role == "assistant" else []
    for left in range(step.retries, -1, -1):
        sent = call.child("attempt", call.name, None, branch.run.clock())
        view = branch.view(target, content)
        try:
            output = await send(
                branch, sent, view, sampling, step.node.constraint, thinking=step.node.thinking
            )
        except (Exception, asyncio.CancelledError) as error:
            sent.error = str(error) or "cancelled"
            raise
        call.text, call.finish, call.prompt_end = output.text, output.finish, sent.prompt_end
        call.thinking = sent.thinking
        try:
            value = read_value(step, output.text)
        except (ValueError, AssertionError) as error:
            sent.error = str(error)
            if not left:
                raise _rejection(step, output.text, error) from error
            branch.note(Retried(step.variable, output.text, error, branch.path))
            content = branch.after(content, output)
            content = _correct(content, opening, describe(error), branch.run.info)
            continue
        if not step.keep_failed:
            content = branch.content
        return Attempted(output, value, content, branch.after(content, output))
    raise AssertionError("unreachable")


def read_value(step: Gen, text: str) -> Any:
    """The value of the output `text`. Raises the errors of `step.parse` and of `step.validate`."""
    value = text if step.parse is None else step.parse(text)
    if step.validate is not None:
        step.validate(value)
    return value


def final_value(step: Gen, text: str) -> Any:
    """The value that `read_value` returns. Raises a `ProgramError`, which quotes the rejected output or
    value, for the errors of `read_value`."""
    try:
        return read_value(step, text)
    except (ValueError, AssertionError) as error:
        raise _rejection(step, text, error) from error


def _rejection(step: Gen, text: str, error: Exception) -> ProgramError:
    try:
        value = text if step.parse is None else step.parse(text)
    except (ValueError, AssertionError):
        what = f"the output {shortened(repr(text), MAX_SHOWN)} is not valid"
    else:
        what = f"validate rejected {shortened(repr(value), MAX_SHOWN)}"
    attempts = f" in the last of {step.retries + 1} attempts" if step.retries else ""
    return ProgramError(f"{what}{attempts}: {describe(error)}", pointer=getattr(error, "pointer", None))


def describe(error: Exception) -> str:
    """The text of an error for the model. An error of pydantic's is written as the list of its problems, each
    with its path and without links."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        text = "; ".join(
            ": ".join(filter(None, [".".join(map(str, one["loc"])), one["msg"]]))
            for one in errors(include_url=False)
        )
    else:
        text = str(error) or type(error).__name__
    return sentence(shortened(text, MAX_PROBLEM))


def _correct(content: Content, opening: list[Piece], problem: str, info: ModelInfo) -> Content:
    if content.dialogue.role != "assistant":
        return content.at(append_text(content.tail, PLAIN_CORRECTION.format(problem=problem)))
    content = begin_turn(end_turn(content, "assistant", info), "user", info)
    content = content.at(append_text(content.tail, CORRECTION.format(problem=problem)))
    content = begin_turn(end_turn(content, "user", info), "assistant", info)
    return content.at(append_pieces(content.tail, opening))
