"""A language model of a few lines of Python, over bytes: token id i < 256 is the byte i."""

from __future__ import annotations

import json
import zlib
from typing import Any

import msgspec
import numpy as np

from ramify.constraint import Constraint
from ramify.messages import (
    Choices,
    ChoiceScore,
    Finish,
    Generate,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.questions import Decide, DecisionScores, FormScores, Question, QuestionScores
from ramify.text import token_text
from tests.model.harmony import marks_in

EOS = 256


def chunks_of(request: Generate, cached: int, script: str | None) -> list[TextChunk]:
    """The chunks of one generation, one for each byte; the last has `finish` set.

    cached : number of prompt tokens that count as cached
    script : the output. None: a fixed text for the constraint, or if there is none, the prompt's last eight
        characters in capitals, the seed, and " …" repeated up to max_tokens (None: 512)
    """
    sampling, prompt = request.sampling, prompt_bytes(request)
    usage = Usage(prompt_tokens=len(prompt), cached_tokens=cached)
    text, finish = reply(prompt, request) if script is None else scripted(script, request)
    ids, controls = tuple(text.encode()), marks_in(text)
    prompt_logprobs = None
    if sampling.prompt_logprobs_start is not None:
        prompt_logprobs = _logprobs(prompt, sampling.logprobs or 0, sampling.prompt_logprobs_start)
    chunks = []
    for i, token in enumerate(ids):
        # A character's text comes with its last byte.
        before, after = (bytes(ids[:k]).decode(errors="ignore") for k in (i, i + 1))
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = _logprobs(bytes([token]), sampling.logprobs, 0, first=False, before=bytes(ids[:i]))
        chunks.append(
            TextChunk(
                rid=request.rid,
                text=after[len(before) :],
                ids=(token,),
                controls=(0,) if len(before) in controls and len(after) > len(before) else (),
                logprobs=logprobs,
                prompt_logprobs=None if i else prompt_logprobs,
                usage=None if i else usage,
            )
        )
    decisions = None
    if request.decide is not None:
        decisions = decided(prompt, request.decide)
        written = sum(len(written_question(one)) for one in request.decide.questions)
        usage = Usage(prompt_tokens=len(prompt) + written, cached_tokens=cached)
    embedding = b""
    if request.pooling is not None:
        embedding = np.array([len(prompt), *prompt[:3]], "<f4").tobytes()
    last = TextChunk(
        rid=request.rid,
        usage=msgspec.structs.replace(usage, completion_tokens=len(ids)),
        finish=finish,
        kept_ids=len(ids),
        prompt_logprobs=None if ids else prompt_logprobs,
        choices=scores(prompt, request.choices),
        decisions=decisions,
        embedding=embedding,
    )
    return [*chunks, last]


def decided(prompt: bytes, decide: Decide) -> DecisionScores:
    """Scores of all questions, each in one form about all options. The log-probability of an option depends
    on the prompt, the question and the option."""
    forms = []
    for question in decide.questions:
        written = written_question(question)
        options = [option.name.encode() for option in question.options]
        forms.append(
            FormScores(
                options=tuple(range(len(options))),
                logprobs=tuple(-(zlib.crc32(prompt + written + name) % 64) / 16 - 3.0 for name in options),
                lengths=tuple(map(len, options)),
                ids=tuple(written) if decide.prompt_ids else (),
            )
        )
    layout = "verbatim-1" if decide.layout == "auto" else f"{decide.layout}-1"
    return DecisionScores(
        questions=tuple(QuestionScores(layout=layout, forms=(form,)) for form in forms),
        state_ids=tuple(prompt) if decide.prompt_ids else (),
    )


def written_question(question: Question) -> bytes:
    lines = (question.instructions, *(f"{one.name}: {one.description}" for one in question.options))
    return "\n".join(lines).encode()


def prompt_bytes(request: Generate) -> bytes:
    if request.chat is not None:
        return "".join(f"<{turn.role}>{turn.content}" for turn in request.chat).encode()
    return b"".join(
        part.encode() if isinstance(part, str) else bytes(token % EOS for token in part)
        for part in request.prompt
    )


def reply(prompt: bytes, request: Generate) -> tuple[str, Finish]:
    sampling = request.sampling
    limit = 512 if sampling.max_tokens is None else sampling.max_tokens
    if request.constraint is not None:
        text = _satisfying(request.constraint)
        return text[:limit], Finish(reason="stop" if len(text) <= limit else "length")
    seed = "" if sampling.seed is None else f"({sampling.seed})"
    text = prompt.decode(errors="ignore")[-8:].upper() + seed + " …" * limit
    text = text.encode()[:limit].decode(errors="ignore")
    found = [(text.index(stop), stop) for stop in sampling.stop if stop in text]
    if found:
        at, stop = min(found)
        return text[:at], Finish(reason="stop", matched=stop)
    return text, Finish(reason="length")


def scripted(text: str, request: Generate) -> tuple[str, Finish]:
    limit = request.sampling.max_tokens
    return text[:limit], Finish(reason="stop" if limit is None or len(text) <= limit else "length")


def _satisfying(constraint: Constraint) -> str:
    match constraint.kind:
        case "choices":
            return str(json.loads(constraint.source)[0])
        case "json_schema":
            return json.dumps(_instance(json.loads(constraint.source)))
        case "json_object":
            return "{}"
        case other:
            return f"<{other}>"


def _instance(schema: Any) -> Any:
    if schema.get("type") == "object":
        return {name: _instance(inner) for name, inner in schema["properties"].items()}
    return {"integer": 7, "string": "s", "boolean": True}[schema["type"]]


def _logprobs(tokens: bytes, top: int, start: int, first: bool = True, before: bytes = b"") -> TokenLogprobs:
    """Log-probabilities from `start` on: -(b % 8) - 0.5 of byte b. The `top` bytes are a, b, c, …"""
    places = range(start, len(tokens))
    best = tuple((ord("a") + k, -0.25 * (k + 1)) for k in range(top))
    tops = () if not top else tuple(() if first and i == 0 else best for i in places)
    return TokenLogprobs(
        ids=tuple(tokens[i] for i in places),
        logprobs=tuple(None if first and i == 0 else -(tokens[i] % 8) - 0.5 for i in places),
        top=tops,
        texts=tuple(token_text(bytes([tokens[i]])) for i in places),
        top_texts=tuple(tuple(chr(token) for token, _ in pairs) for pairs in tops),
        offsets=() if first else (len(before.decode(errors="ignore")),),
    )


def scores(prompt: bytes, choices: Choices | None) -> tuple[ChoiceScore, ...]:
    """Scores of the bytes of each choice after `prompt`."""
    return tuple(
        ChoiceScore(
            tokens=_logprobs(prompt + text.encode(), 0, len(prompt)),
            unconditional=_logprobs(text.encode(), 0, 0) if choices.unconditional else None,
        )
        for text in (() if choices is None else choices.texts)
    )


def common(one: bytes, other: bytes) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
