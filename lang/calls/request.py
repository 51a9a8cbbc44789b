"""One request of a program to its backend: the prompt of a branch goes out, the output comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ramify.constraint import Constraint
from ramify.errors import BackendError, Cancelled, RamifyError, UnsupportedNode
from ramify.lang.calls.chat import Thought, open_answer
from ramify.lang.calls.delivery import Delivery, least_usage
from ramify.lang.calls.hints import hint_of
from ramify.lang.calls.limits import begin_call, check_answer
from ramify.lang.calls.meta_info import meta_info
from ramify.lang.calls.target import Target
from ramify.lang.calls.thinking import MARKS, ThoughtSplitter, most_tokens, preambles_of, thinking_of
from ramify.lang.calls.transcript import ends_on_token, prompt_of
from ramify.lang.calls.view import View
from ramify.lang.program.variables import Variable
from ramify.lang.trace.calls import CURRENT, Call
from ramify.lang.trace.tokens import tokens_of
from ramify.loop import cancel_at_end
from ramify.messages import (
    HELD_S,
    Choices,
    ChoiceScore,
    Enforcement,
    Finish,
    Generate,
    NextUse,
    Thinking,
    TokenLogprobs,
    Usage,
    Violation,
    concatenated,
)
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """The joined chunks of one generation. `text` is the text of ``ids[:kept_ids]`` followed by `tail`."""

    rid: str
    target: Target
    text: str
    ids: tuple[int, ...]
    kept_ids: int
    tail: str
    usage: Usage
    finish: Finish
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    choices: tuple[ChoiceScore, ...]
    thinking: str = ""
    """The thoughts before the answer, which is `text`. `ids` and `kept_ids` are of both."""
    thought: Thought | None = None
    """Set where it was said whether to think."""
    enforcement: Enforcement | None = None
    violations: tuple[Violation, ...] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        """SGLang's ``meta_info``."""
        meta = meta_info(self.rid, self.usage, self.finish, self.logprobs, self.prompt_logprobs)
        if self.enforcement is not None:
            meta |= self.enforcement.fields()
        if self.violations is not None:
            meta["violations"] = list(self.violations)
        return meta


async def send(
    branch: Branch,
    call: Call,
    view: View,
    sampling: SamplingParams,
    constraint: Constraint | None = None,
    follow: Variable | None = None,
    next_use: NextUse | None = None,
    choices: Choices | None = None,
    thinking: Thinking | None = None,
) -> Output:
    """Generate after `view`, or score `choices` there, and record the result in `call`.

    Args:
        follow: The variable that receives each chunk while it is generated, if the run streams.
        next_use: When the branch continues from here, where the step knows it.
        thinking: Whether the model thinks before it answers.

    A request that fails by an error that may pass is sent again, as the backend's `retry` says. Raises the
    backend's errors, `Cancelled` where the backend aborts, `BudgetExceeded` before and after a request that
    exceeds a limit, and `BackendError` where the chunks end without a final one.
    """
    run, target = branch.run, view.target
    opened = view
    if thinking is not None and not target.takes_messages:
        dialogue, tail = open_answer(view.dialogue, view.tail, thinking, target.info)
        opened = view._replace(dialogue=dialogue, tail=tail)
    call.model, call.prompt_end = target.name, opened.tail
    if ends_on_token(opened.tail):
        sampling = msgspec.structs.replace(sampling, token_healing=False)
    limits, wanted = branch.limits, sampling.max_tokens
    if limits:
        thoughts = most_tokens(thinking)
        given = None if wanted is None else wanted + thoughts
        sampling = begin_call(limits, msgspec.structs.replace(sampling, max_tokens=given))
        if thinking is not None and thoughts and (left := sampling.max_tokens) is not None:
            answer = left if wanted is None else min(wanted, left)
            sampling = msgspec.structs.replace(sampling, max_tokens=answer)
            thinking = msgspec.structs.replace(thinking, max_tokens=max(0, left - answer - MARKS))
    cut = sampling.max_tokens != wanted
    call.followed = follow is not None and run.stream
    request = Generate(
        rid=run.next_rid(),
        sampling=sampling,
        constraint=constraint,
        choices=choices,
        hint=hint_of(branch, call, view, opened, next_use),
        scope=run.scope,
        every_s=0.0 if call.followed else HELD_S,
        priority=_priority(branch, call, target),
        lora=_lora(branch, call, target),
        **_prompt(branch, view, opened, thinking),
    )
    marks = thinking_of(target.info) if request.preambles else None
    delivery = Delivery(branch, target, call, follow if call.followed else None, marks)
    token = CURRENT.set(call)
    try:
        rid = await delivery.receive(request)
    except RamifyError as error:
        if cut and error.field == "max_tokens":
            check_answer(limits, None, cut=True)
        raise
    finally:
        CURRENT.reset(token)
        received = delivery.received
        call.text = "".join([chunk.text for chunk in received])
        split = delivery.split
        if thinking is not None:
            call.thinking = "".join([chunk.reasoning for chunk in received])
            call.before = "" if split is None else split.before
        call.tokens = tokens_of(delivery.generated)
        call.end_s = run.clock()
        call.first_text_s = _first_text_s(call)
        last = received[-1] if received else None
        call.finish = last.finish if last is not None else None
        if call.finish is None:
            call.own_usage = least_usage(call.own_usage, received)
        for limit in limits:
            limit.spend(call.spent, target.backend)
    if last is None or last.finish is None:
        raise BackendError("The backend ended a generation without a final chunk.")
    if limits:
        check_answer(limits, last.finish, cut=cut and last.finish.reason == "length")
    if last.finish.reason == "abort":
        raise Cancelled("The backend aborted the generation.")
    call.scores = concatenated([chunk.prompt_logprobs for chunk in received])
    return Output(
        rid=rid,
        target=target,
        text=call.text,
        ids=call.tokens.ids,
        kept_ids=last.kept_ids,
        tail=last.tail,
        usage=call.own_usage,
        finish=last.finish,
        logprobs=concatenated([chunk.logprobs for chunk in received]),
        prompt_logprobs=call.scores,
        choices=last.choices,
        thinking=call.thinking or "",
        thought=None if thinking is None else _thought(target, thinking, call, last.kept_ids, split),
        enforcement=next((chunk.enforcement for chunk in received if chunk.enforcement), None),
        violations=last.violations,
    )


def _thought(
    target: Target, thinking: Thinking, call: Call, kept_ids: int, split: ThoughtSplitter | None
) -> Thought:
    thoughts = call.thinking or ""
    if split is None:
        return Thought(target, thinking, thoughts, "", (), "")
    told = call.tokens is not None and 0 < split.ids <= kept_ids
    ids = call.tokens.ids[: split.ids] if call.tokens is not None and told else ()
    return Thought(target, thinking, thoughts, split.before + split.head, ids, split.head)


def _priority(branch: Branch, call: Call, target: Target) -> int:
    """The step's priority, else that of the run, else that of the backend."""
    for given in (call.priority, branch.run.options.get("priority")):
        if given is not None:
            return int(given)
    return target.priority


def _lora(branch: Branch, call: Call, target: Target) -> str:
    """The step's LoRA adapter, else that of the run, else that of the backend. The run's is one of its own
    backend's: a step on another backend does not have it."""
    own = branch.run.options.get("lora") if target is branch.run.home else None
    for given in (call.lora, own):
        if given is not None:
            return str(given)
    return target.lora


def _first_text_s(call: Call) -> float | None:
    """When the first text was generated. A backend may deliver the text of an unstreamed call late, so that
    the time of the first chunk says too little."""
    usage = call.own_usage
    if call.followed or call.first_text_s is None or call.end_s is None or not usage.first_token_s:
        return call.first_text_s
    return min(call.first_text_s, max(call.end_s - usage.writing_s, call.start_s))


def _prompt(branch: Branch, view: View, opened: View, thinking: Thinking | None) -> dict[str, Any]:
    """The prompt as segments, or as messages for a backend that takes messages only, and the thinking.

    `opened` is `view` with the mark that begins the thoughts.
    """
    target, dialogue = view.target, view.dialogue
    if not target.takes_messages:
        prompt = prompt_of(opened.tail, view.prompt)
        branch.remember(view, prompt)
        return {"prompt": prompt.segments, "preambles": preambles_of(thinking, target.info)}
    if dialogue.role != "assistant" or view.tail is not dialogue.start:
        raise UnsupportedNode(
            f"{target.info.name} takes whole messages only.",
            remedy="Put exactly one gen, and nothing before it, in each assistant turn.",
        )
    return {"chat": dialogue.messages, "thinking": thinking}


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all concurrently and return the results. Where one fails, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    async with cancel_at_end(tasks):
        return await asyncio.gather(*tasks)
