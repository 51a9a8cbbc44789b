"""Decisions by log-probabilities, for endpoints without a decision API: one request per form of a question.

Example: the form "Which team?\\nA. billing\\nB. returns\\n…" is sent with max_tokens 1 and top_logprobs 20.

    first token's window    A -0.3, " A" -4.0, B -1.6, The -3.2, …
    scores                  billing ln(e^-0.3 + e^-4.0), returns -1.6

An option is scored only by a token that is its whole spelling, with or without a space before it. If no such
token is in the window, the request is refused: the option's probability is not known. A spelling outside of
the window beside one inside does not count; it has less than the window's least probability.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from msgspec.structs import replace

from ramify.decisions.layouts import BLANK_LINE, LAYOUTS, PLAIN_CLOSING, Form
from ramify.errors import UnsupportedNode
from ramify.loop import cancel_at_end
from ramify.messages import ChatMessage, Generate, TextChunk, Thinking, TokenLogprobs, Usage, concatenated
from ramify.questions import Decide, DecisionScores, FormScores, QuestionScores
from ramify.retry import Retry
from ramify.sampling_params import SamplingParams

WINDOW = 20
"""Tokens whose log-probabilities are asked for: the most that OpenAI's chat API gives."""
AT_ONCE = 32
"""Most requests in flight for one `Decide`."""
USE_ENGINE = "Use Engine or RuntimeEndpoint."


async def scores_by_logprobs(
    generate: Callable[[Generate], AsyncIterator[TextChunk]],
    retry: Retry,
    request: Generate,
    decide: Decide,
    thinking: Thinking | None,
) -> tuple[DecisionScores, Usage]:
    """Scores of the questions of `decide` behind the prompt of `request`, and the usage of all requests.

    generate : sends one request to the endpoint; each is sent again by the policy `retry`
    thinking : the setting with which the model is asked not to think

    Raises `UnsupportedNode` for what a window cannot show: an end of turn, more options than tokens, and an
    option that is not in the window.
    """
    layout = LAYOUTS.get("labels" if decide.layout == "auto" else decide.layout)
    if layout is None:
        raise _refused(f"has no layout {decide.layout}", "decide.layout", USE_ENGINE)
    if decide.end != "prefix":
        raise _refused("shows one token, and not the end of a turn", "decide.end", USE_ENGINE)
    written = [[*layout.forms(question, decide.permutations)] for question in decide.questions]
    for number, forms in enumerate(written):
        if len({spelling.option for spelling in forms[0].spellings}) > WINDOW:
            raise _refused(
                f"shows {WINDOW} tokens; this question has more options",
                f"decide.questions[{number}].options",
                'Say layout="isolated", or use Engine or RuntimeEndpoint.',
            )
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, form: Form) -> tuple[FormScores, Usage]:
        one = replace(
            _asked(request, form),
            decide=None,
            hint=None,
            thinking=thinking,
            sampling=SamplingParams(max_tokens=1, logprobs=WINDOW),
        )

        async def answer() -> list[TextChunk]:
            async with aclosing(cast("AsyncGenerator[TextChunk, None]", generate(one))) as chunks:
                return [chunk async for chunk in chunks]

        async with places:
            chunks = await retry.call(answer)
        logprobs = concatenated([chunk.logprobs for chunk in chunks])
        return _form_scores(form, logprobs, f"decide.questions[{number}]"), chunks[-1].usage or Usage()

    pairs = [(number, form) for number, forms in enumerate(written) for form in forms]
    # The first request alone fills the endpoint's prefix cache, and finds out whether the options are shown.
    answered = [await ask(*pairs[0])]
    tasks = [asyncio.ensure_future(ask(*pair)) for pair in pairs[1:]]
    async with cancel_at_end(tasks):
        answered += await asyncio.gather(*tasks)
    found = iter([scores for scores, _ in answered])
    questions = [
        QuestionScores(layout=layout.name, forms=tuple([next(found) for _ in forms])) for forms in written
    ]
    usages = [usage for _, usage in answered]
    return DecisionScores(questions=tuple(questions)), Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )


def _asked(request: Generate, form: Form) -> Generate:
    """`request` with the form behind its prompt: in the last turn if a user's, else in a new user turn."""
    body = "".join([part for part in form.body if isinstance(part, str)])
    if request.chat is None:
        return replace(request, prompt=(*request.prompt, BLANK_LINE + body + PLAIN_CLOSING))
    *before, last = request.chat
    if last.role == "user":
        return replace(request, chat=(*before, replace(last, content=last.content + BLANK_LINE + body)))
    return replace(request, chat=(*request.chat, ChatMessage(role="user", content=body)))


def _form_scores(form: Form, logprobs: TokenLogprobs | None, field: str) -> FormScores:
    """The scores of the spellings that are in the window of the first token. Raises `UnsupportedNode` for an
    option without any."""
    if logprobs is None or not logprobs.top_texts:
        raise _refused("has no decision API and gives no log-probabilities", "decide", USE_ENGINE)
    window: dict[str, list[float]] = {}
    for text, (_, logprob) in zip(logprobs.top_texts[0], logprobs.top[0], strict=True):
        window.setdefault(text.removeprefix(" "), []).append(logprob)
    scored = [spelling for spelling in form.spellings if spelling.text in window]
    missing = {spelling.option for spelling in form.spellings} - {spelling.option for spelling in scored}
    if missing:
        option = min(missing)
        spelled = next(spelling.text for spelling in form.spellings if spelling.option == option)
        shown = ", ".join(map(repr, logprobs.top_texts[0][:3]))
        raise _refused(
            f"does not show the probability of {spelled!r} among the {len(window)} most probable tokens, "
            f"which begin with {shown}",
            f"{field}.options[{option}]",
            f'{USE_ENGINE} If the model thinks first, say OpenAI(thinking="template").',
        )
    return FormScores(
        options=tuple([spelling.option for spelling in scored]),
        logprobs=tuple([_log_sum(window[str(spelling.text)]) for spelling in scored]),
        lengths=(1,) * len(scored),
        about=form.about,
    )


def _log_sum(values: Sequence[float]) -> float:
    return max(values) if len(values) == 1 else math.log(math.fsum(math.exp(value) for value in values))


def _refused(what: str, field: str, remedy: str) -> UnsupportedNode:
    return UnsupportedNode(f"This endpoint {what}.", field=field, remedy=remedy)
