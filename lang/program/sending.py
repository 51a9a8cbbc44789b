"""The request of a step: its prompt, limits, priority, LoRA adapter and hint.

The hint names the program and the branch, and says when the KV pages of the request will be needed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ramify.constraint import Constraint
from ramify.errors import UnsupportedNode
from ramify.lang.calls import request
from ramify.lang.calls.limits import allow_call
from ramify.lang.calls.request import Output
from ramify.lang.calls.session import Target
from ramify.lang.program.step_output import StepOutput
from ramify.lang.prompt.chat import open_answer
from ramify.lang.prompt.thinking import preambles_of
from ramify.lang.prompt.transcript import ends_on_token, place_of, prompt_of
from ramify.lang.prompt.view import View
from ramify.lang.trace.calls import Call
from ramify.lang.trace.spans import request_span
from ramify.messages import HELD_S, Choices, Generate, NextUse, ProgramHint, Thinking
from ramify.questions import Decide
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch


async def send(
    branch: Branch,
    call: Call,
    view: View[Target],
    sampling: SamplingParams,
    constraint: Constraint | None = None,
    follow: StepOutput | None = None,
    next_use: NextUse | None = None,
    choices: Choices | None = None,
    thinking: Thinking | None = None,
    decide: Decide | None = None,
    opened: View[Target] | None = None,
    unlimited: bool = False,
) -> Output:
    """Generate after `view`, or score `choices` after it, or ask the questions of `decide` about it, and
    record the result in `call`.

    Args:
        follow: The step's output, which takes each chunk while it is generated, or if the run does not stream
            the whole at the end; None for a request whose output is not the step's.
        next_use: The next use of the branch's pages, if the step knows it; None to derive it from the queue.
        thinking: The step's setting of thinking; None if the step has none.
        opened: `view` with text appended that only this request has; None for `view` itself.
        unlimited: Whether a request without max_tokens may fill the context. Otherwise it has the run's
            `default_tokens`, or as many of them as the backend allows.

    Raises the errors of `ramify.lang.calls.request.send`, and `BudgetExceeded` if a limit does not allow the
    request.
    """
    run, target = branch.run, view.target
    opened = opened or view
    if thinking is not None and not target.takes_messages:
        opened = view._replace(content=open_answer(view.content, thinking, target.info))
    call.model, call.prompt_end = target.name, opened.content.tail
    if ends_on_token(opened.content.tail):
        sampling = msgspec.structs.replace(sampling, token_healing=False)
    cut_to_fit = sampling.max_tokens is None and not unlimited
    if cut_to_fit:
        sampling = msgspec.structs.replace(sampling, max_tokens=run.default_tokens)
    allowance = allow_call(branch.limits, sampling, thinking)
    call.followed = follow is not None and run.stream
    prompt = _prompt(branch, view, opened, allowance.thinking, decide)
    made = Generate(
        rid=run.next_rid(),
        sampling=allowance.sampling,
        cut_to_fit=cut_to_fit,
        constraint=constraint,
        choices=choices,
        decide=decide,
        hint=hint_of(branch, call, view, opened, next_use, "prompt" in prompt),
        scope=run.scope,
        every_s=0.0 if call.followed else HELD_S,
        priority=_first(call.priority, run.options.get("priority"), target.priority),
        lora=lora_of(branch, call, target),
        **prompt,
    )

    show = follow.take if follow is not None and run.stream else None
    with request_span(call, made, target.info.name):
        output = await request.send(run, target, call, made, allowance, allowance.thinking, show)
    if follow is not None and not run.stream:
        follow.note(output.thinking, output.text)
    return output


def lora_of(branch: Branch, call: Call, target: Target) -> str:
    """The LoRA adapter of the request of `call`. The run's adapter is one of its own backend."""
    run = branch.run
    of_run = run.options.get("lora") if target is run.home else None
    name: str = _first(call.lora, of_run, target.lora)
    return name


def _prompt(
    branch: Branch, view: View[Target], opened: View[Target], thinking: Thinking | None, decide: Decide | None
) -> dict[str, Any]:
    """The fields of `Generate` for the prompt: segments, or messages for a backend that takes only messages.
    `opened` is `view` with the text that only this request has, such as the beginning of thoughts; else
    `view` itself. Questions without an opening of their own are asked about messages, if there are any."""
    target, dialogue = view.target, view.content.dialogue
    if decide is not None:
        messages = opened.content.dialogue.messages
        if target.takes_messages or (messages and decide.opening is None):
            return {"chat": messages}
        return {"prompt": prompt_of(opened.content.tail, view.prompt).segments}
    if not target.takes_messages:
        prompt = prompt_of(opened.content.tail, view.prompt)
        branch.remember(view, prompt)
        return {"prompt": prompt.segments, "preambles": preambles_of(thinking, target.info)}
    if dialogue.role != "assistant" or view.content.tail is not dialogue.start:
        raise UnsupportedNode(
            f"{target.info.name} takes whole messages only.",
            remedy="Put exactly one gen, and nothing before it, in each assistant turn.",
        )
    return {"chat": dialogue.messages, "thinking": thinking}


def _first(*given: Any) -> Any:
    return next(one for one in given if one is not None)


LEASE_S = 60.0
"""Length in seconds of the lease on the pages of a branch that may continue. The lease ends earlier if the
program ends."""


def hint_of(
    branch: Branch,
    call: Call,
    view: View[Target],
    opened: View[Target],
    next_use: NextUse | None,
    places: bool,
) -> ProgramHint:
    """The hint of the request of `call`.

    Args:
        view: The content before the request.
        opened: `view` with the text that only this request has; else `view` itself.
        next_use: The next use of the branch's pages, if the step knows it; None to derive it from the queue.
        places: Whether the request has a prompt, in which the hint can name places.
    """
    run, target = branch.run, view.target
    if branch.is_last_step:
        next_use = "never"
    elif next_use is None:
        next_use = "soon" if branch.returns_to(target) else "unknown"
    return ProgramHint(
        program=run.program,
        name=run.root.call.name,
        lease_s=0.0 if next_use == "never" and not branch.forks else LEASE_S,
        path=call.path,
        next_use=next_use,
        branch=branch.key,
        forks=branch.forks,
        ended=run.take_ended(target),
        parts=_parts(branch, view, opened) if places else (),
        calls_left=run.queued_calls(target) if run.closed.is_set() else None,
        limits=tuple([limit.hint(target.backend) for limit in branch.limits]),
    )


def _parts(branch: Branch, view: View[Target], opened: View[Target]) -> tuple[tuple[int, int], ...]:
    """The places in the prompt after which later prompts of the program may differ from it.

    One place is the fork of the branch, which is returned only for the first request of the branch. The other
    place is the beginning of the thoughts, which are removed from later prompts.
    """
    target, found = view.target, []
    if target is not branch.run.home:
        return ()
    if branch.fork_point is not None and not branch.fork_told:
        branch.fork_told = True
        found.append(place_of(branch.fork_point, view.prompt))
    if opened.content.tail is not view.content.tail:
        found.append(place_of(view.content.tail, view.prompt))
    return tuple(found)
