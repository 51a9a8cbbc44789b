"""Response bodies of OpenAI's API (API reference, chat completions and completions), as msgspec structs.

Fields beyond that API are in objects named ``ramify``, except for `matched_stop`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.messages import TextChunk, TokenLogprobs, Unenforced, Usage, Violation
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.metrics import PromptTotals
from ramify.text import token_bytes


class Reply(msgspec.Struct, kw_only=True):
    """Base class of all bodies."""


class GenerationReply(Reply, kw_only=True):
    """Base class of the bodies of generations, whole and streamed."""

    id: str
    created: int
    model: str
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    """The service tier; unset if the request names none."""


class PromptTokensDetails(Reply):
    cached_tokens: int


class UsageExtras(Reply):
    computed_tokens: int
    """Prompt tokens that were not cached."""
    forced_tokens: int
    """Completion tokens that the grammar forced."""
    draft_tokens: int
    """Draft tokens of speculative decoding that were verified. `accepted_tokens` counts those of them that
    were accepted. The fields with `model` in their names count tokens proposed by the draft model."""
    accepted_tokens: int
    model_draft_tokens: int
    model_accepted_tokens: int
    retractions: int
    queue_s: float
    first_token_s: float
    total_s: float


class CompletionTokensDetails(Reply):
    reasoning_tokens: int
    """Tokens of the reasoning, including its end mark."""


class UsageReply(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    ramify: UsageExtras
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """Details; unset unless reasoning was asked for."""


class TopLogprob(Reply):
    token: str
    logprob: float | None
    bytes: list[int]
    """The UTF-8 bytes of the token, which may be only a part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionReply(Reply):
    arguments: str
    """JSON text of the arguments; in a stream, the next piece of it."""
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallReply(Reply):
    id: str
    function: FunctionReply
    type: str = "function"


class ToolCallDelta(Reply):
    index: int
    function: FunctionReply
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatMessageReply(Reply):
    content: str | None
    """Text of the answer; null if the turn has only tool calls."""
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET


class ChoiceExtras(Reply):
    unenforced: list[Unenforced] | msgspec.UnsetType = msgspec.UNSET
    """Schema keywords that the grammar leaves out (``strict: false``)."""
    grammar_backend: str | msgspec.UnsetType = msgspec.UNSET
    """The library that compiled the grammar; unset if it is Ramify's own. The next two fields are for such a
    library."""
    narrowed: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Descriptions of valid texts that the grammar does not allow."""
    may_be_cut: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether an output that reaches max_tokens may be incomplete (``finish_reason: "length"``)."""
    violations: list[Violation] | msgspec.UnsetType = msgspec.UNSET
    """Schema keywords that the output does not satisfy (``strict: "validate"``)."""


class ChatChoice(Reply):
    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    ramify: ChoiceExtras | msgspec.UnsetType = msgspec.UNSET


class ChatReply(GenerationReply):
    choices: list[ChatChoice]
    usage: UsageReply
    object: str = "chat.completion"


class Delta(Reply):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Reply):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET
    ramify: ChoiceExtras | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(GenerationReply):
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """For each token, the place in the text of the first character that the token is a part of."""


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | msgspec.UnsetType | None = msgspec.UNSET
    ramify: ChoiceExtras | msgspec.UnsetType = msgspec.UNSET


class CompletionReply(GenerationReply):
    """A whole response, or one event of a stream."""

    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(Reply):
    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int
    model_impl: str
    object: str = "model"
    owned_by: str = "ramify"


class ModelList(Reply):
    data: list[ModelCard]
    object: str = "list"


def choice_extras(outcome: TextChunk | GenerationResult) -> ChoiceExtras | msgspec.UnsetType:
    """The fields of a choice beyond OpenAI's API; unset if there are none."""
    extras = {} if outcome.enforcement is None else outcome.enforcement.fields()
    if outcome.violations is not None:
        extras["violations"] = list(outcome.violations)
    return ChoiceExtras(**extras) if extras else msgspec.UNSET


def usage_reply(usages: Sequence[Usage], n: int) -> UsageReply:
    """The total usage of all choices. Each prompt has `n` consecutive choices."""
    totals = [PromptTotals.of_choices(usages[i : i + n]) for i in range(0, len(usages), n)]
    prompt = sum(one.prompt for one in totals)
    cached = sum(one.cached for one in totals)
    completion = sum(one.completion for one in totals)
    return UsageReply(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        ramify=UsageExtras(
            computed_tokens=prompt - cached,
            forced_tokens=sum(one.forced for one in totals),
            draft_tokens=sum(usage.draft_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
            model_draft_tokens=sum(usage.model_draft_tokens for usage in usages),
            model_accepted_tokens=sum(usage.model_accepted_tokens for usage in usages),
            retractions=sum(usage.retractions for usage in usages),
            queue_s=min(usage.queue_s for usage in usages),
            first_token_s=min(usage.first_token_s for usage in usages),
            total_s=max(usage.total_s for usage in usages),
        ),
    )


def chat_logprobs(runs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """`runs` in the form in which chat completions write log-probabilities."""
    content = []
    for run in runs:
        for i, (text, logprob) in enumerate(zip(run.texts, run.logprobs, strict=True)):
            top = []
            if run.top:
                top = [
                    TopLogprob(token=token, logprob=value, bytes=list(token_bytes(token)))
                    for token, (_, value) in zip(run.top_texts[i], run.top[i], strict=True)
                ]
            content.append(
                TokenLogprob(token=text, logprob=logprob, bytes=list(token_bytes(text)), top_logprobs=top)
            )
    return ChatLogprobs(content=content)


def completion_logprobs(
    prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs], echo: str
) -> CompletionLogprobs:
    """The log-probabilities of the prompt and of the output, in the form of completions. `echo` is the text
    of the prompt; without prompt log-probabilities, `prompt` is empty."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for run in (*prompt, *output):
        for i, (text, logprob) in enumerate(zip(run.texts, run.logprobs, strict=True)):
            tokens.append(text)
            logprobs.append(logprob)
            best: dict[str, float] = {}
            if run.top and run.top[i]:
                for token, (_, value) in zip(run.top_texts[i], run.top[i], strict=True):
                    best.setdefault(token, value)
                if logprob is not None:
                    best.setdefault(text, logprob)
            top.append(best or None)
    offsets = _places([text for run in prompt for text in run.texts], echo)
    offsets += [len(echo) + offset for run in output for offset in run.offsets]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=logprobs,
        top_logprobs=top if any(top) else None,
        text_offset=offsets,
    )


def _places(tokens: Sequence[str], text: str) -> list[int]:
    """The place in `text`, in characters, of each of `tokens`, which spell the text. A token that is not part
    of the text has no width, such as a special token that the tokenizer adds, or SentencePiece's space before
    the first word."""
    data, at, begun, places = text.encode(), 0, 0, []
    for token in tokens:
        places.append(begun - (at < len(data) and not _begins(data[at])))
        spelled = token_bytes(token)
        if at == 0 and not data.startswith(spelled):
            spelled = spelled.removeprefix(b" ")
        if data.startswith(spelled, at):
            at += len(spelled)
            begun += sum(map(_begins, spelled))
    return places


def _begins(byte: int) -> bool:
    """Whether `byte` is the first byte of a UTF-8 character."""
    return byte & 0xC0 != 0x80
