"""Parts of response bodies of OpenAI's API: the usage, log-probabilities, and the fields beyond that API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.messages import Enforcement, TextChunk, TokenLogprobs, Usage, Violation
from ramify.runtime.server.metrics import PromptTotals
from ramify.text import token_bytes

Body = dict[str, Any]
"""A JSON object of a response. Fields beyond OpenAI's API are in objects named ``ramify``, except for
`matched_stop`."""


def choice_extras(violations: Sequence[Violation] | None, enforcement: Enforcement | None) -> Body:
    """The value of ``ramify`` in a choice; empty if there is nothing to report.

    unenforced : schema keywords that the grammar leaves out (``strict: false``)
    grammar_backend : the library that compiled the grammar, if it is not Ramify's own
    narrowed : descriptions of valid texts that the other library's grammar does not allow
    may_be_cut : whether, with the other library, an output that reaches max_tokens may be incomplete
    violations : schema keywords that the output does not satisfy (``strict: "validate"``)
    """
    extras = {} if enforcement is None else enforcement.fields()
    if violations is not None:
        extras["violations"] = list(violations)
    return extras


def usage_body(usages: Sequence[Usage], n: int) -> Body:
    """The total usage of all choices. `usages` has `n` consecutive entries for each prompt."""
    totals = [PromptTotals.of_choices(usages[i : i + n]) for i in range(0, len(usages), n)]
    prompt = sum(one.prompt for one in totals)
    cached = sum(one.cached for one in totals)
    completion = sum(one.completion for one in totals)
    summed = ("draft_tokens", "accepted_tokens", "model_draft_tokens", "model_accepted_tokens", "retractions")
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "ramify": {
            "computed_tokens": prompt - cached,
            "forced_tokens": sum(one.forced for one in totals),
            **{name: sum(getattr(usage, name) for usage in usages) for name in summed},
            "grammar_s": min(usage.grammar_s for usage in usages),
            "queue_s": min(usage.queue_s for usage in usages),
            "first_token_s": min(usage.first_token_s for usage in usages),
            "total_s": max(usage.total_s for usage in usages),
        },
    }


def timings_body(usage: Usage) -> Body:
    """The times of one generation, under llama.cpp's names. The time of the prompt ends with the first token,
    and does not contain the time in the queue."""
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    prompt_ms = 1000.0 * usage.prefill_s
    predicted_ms = 1000.0 * usage.decode_s
    body: Body = {"cache_n": usage.cached_tokens}
    for name, tokens, ms in (("prompt", prompt, prompt_ms), ("predicted", predicted, predicted_ms)):
        body |= {
            f"{name}_n": tokens,
            f"{name}_ms": ms,
            f"{name}_per_token_ms": ms / tokens if tokens else 0.0,
            f"{name}_per_second": 1000.0 * tokens / ms if ms > 0.0 else 0.0,
        }
    if usage.draft_tokens:
        body |= {"draft_n": usage.draft_tokens, "draft_n_accepted": usage.accepted_tokens}
    return body


class Timings:
    """The times of a generation while it runs."""

    def __init__(self) -> None:
        self._usage = Usage()
        self._tokens = 0
        self._since = 0.0
        self._ended = False

    def push(self, chunk: TextChunk) -> None:
        """Add `chunk`, the next one."""
        self._tokens += len(chunk.ids)
        self._ended = chunk.finish is not None
        if chunk.usage is not None:
            self._usage, self._since = chunk.usage, time.perf_counter()

    def body(self) -> Body:
        """The times up to the last chunk that was added."""
        if self._ended:
            return timings_body(self._usage)
        total_s = self._usage.total_s + time.perf_counter() - self._since
        return timings_body(
            msgspec.structs.replace(self._usage, completion_tokens=self._tokens, total_s=total_s)
        )


def chat_logprobs(runs: Sequence[TokenLogprobs]) -> list[Body]:
    """The entries for the log-probabilities of `runs`, as in chat completions."""
    content = []
    for run in runs:
        for i, (text, logprob) in enumerate(zip(run.texts, run.logprobs, strict=True)):
            top = []
            if run.top:
                pairs = zip(run.top_texts[i], run.top[i], strict=True)
                top = [_token(token, value) for token, (_, value) in pairs]
            content.append(_token(text, logprob) | {"top_logprobs": top})
    return content


def _token(text: str, logprob: float | None) -> Body:
    """`bytes` are the UTF-8 bytes of the token, which may be only a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes(text))}


def completion_logprobs(prompt: Sequence[TokenLogprobs], output: Sequence[TokenLogprobs], echo: str) -> Body:
    """The log-probabilities of the prompt and of the output, in the form of completions. `echo` is the text
    of the prompt; without prompt log-probabilities, `prompt` is empty. ``text_offset`` has the position of
    each token: that of the first character that the token is a part of."""
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
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": top if any(top) else None,
        "text_offset": offsets,
    }


def _places(tokens: Sequence[str], text: str) -> list[int]:
    """The position in `text`, in characters, of each of the `tokens` that spell it. A token that is not part
    of the text has no width: a special token that the tokenizer adds, or SentencePiece's space before the
    first word."""
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
    return byte & 0xC0 != 0x80
