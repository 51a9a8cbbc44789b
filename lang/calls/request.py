"""One request of a program to its backend, and the output that comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ramify.errors import BackendError, Cancelled, RamifyError
from ramify.lang.calls.delivery import Delivery, least_usage
from ramify.lang.calls.limits import Allowance, check_answer
from ramify.lang.calls.session import Session, Target
from ramify.lang.prompt.chat import Thought
from ramify.lang.prompt.thinking import ThoughtSplitter, thinking_of
from ramify.lang.trace.calls import CURRENT, Call
from ramify.lang.trace.outputs import meta_info, tokens_of
from ramify.loop import cancel_at_end
from ramify.messages import (
    ChoiceScore,
    Enforcement,
    Finish,
    Generate,
    TextChunk,
    Thinking,
    TokenLogprobs,
    Usage,
    Violation,
    concatenated,
)
from ramify.questions import DecisionScores

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """The concatenated chunks of one generation. `text` is the text of ``ids[:kept_ids]`` followed by
    `tail`."""

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
    decisions: DecisionScores | None
    thinking: str = ""
    """The thoughts before the answer `text`. `ids` and `kept_ids` include the tokens of the thoughts."""
    thought: Thought | None = None
    """The mark with which the thoughts are added to the branch's content; None for a step without
    ``thinking=``."""
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
    session: Session,
    target: Target,
    call: Call,
    request: Generate,
    allowance: Allowance,
    thinking: Thinking | None = None,
    show: Callable[[TextChunk], None] | None = None,
) -> Output:
    """Send `request` and record the result in `call`.

    Args:
        allowance: The request's limits, as `allow_call` has returned them.
        thinking: The step's setting of thinking; None if the step has none.
        show: Called with each chunk while it is generated; None if the text is not streamed to a reader.

    A request that fails with a transient error is sent again by the policy `retry` of the backend. Raises the
    backend's errors, `Cancelled` if the backend aborts the request, `BudgetExceeded` if the answer exceeds a
    limit, and `BackendError` if the chunks end without a final one.
    """
    limits, cut = allowance.limits, allowance.cut
    marks = thinking_of(target.info) if request.preambles else None
    delivery = Delivery(session, target, call, show, marks)
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
        call.end_s = session.clock()
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
        # An engine with a lower bound may have ended the answer before the limits' tokens were spent.
        whole = call.own_usage.completion_tokens >= (allowance.sampling.max_tokens or 0)
        check_answer(limits, last.finish, cut=cut and whole and last.finish.reason == "length")
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
        decisions=last.decisions,
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


def _first_text_s(call: Call) -> float | None:
    """Seconds from the start of the run to the moment when the runtime generated the first text; None if
    there was none.

    If a call does not stream, its text may be delivered late, so its first chunk may arrive later than this
    moment.
    """
    usage = call.own_usage
    if call.followed or call.first_text_s is None or call.end_s is None or not usage.first_token_s:
        return call.first_text_s
    return min(call.first_text_s, max(call.end_s - usage.decode_s, call.start_s))


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all of `work` concurrently and return the results in order. If one fails, the others are cancelled
    and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    async with cancel_at_end(tasks):
        return await asyncio.gather(*tasks)
