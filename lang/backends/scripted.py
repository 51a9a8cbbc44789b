"""A backend that answers from a script, so that programs can be tested without a model.

It has a tokenizer of its own (words and punctuation, each with the space before it), keeps the exact
prefix cache that a radix tree of page size 1 would keep, and streams. It is deterministic and instant.
"""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from ramify.constraint import Constraint
from ramify.errors import BackendError, PromptTooLong, UnsupportedNode
from ramify.lang.backends.tag_check import check_tag
from ramify.lang.chat import chatml
from ramify.lang.trace import CURRENT, Call
from ramify.messages import (
    ChatFormat,
    Finish,
    Generate,
    ModelInfo,
    Segment,
    TextChunk,
    TokenLogprobs,
    Usage,
)

Answer = str | Callable[[Generate], str] | BaseException
"""A text, a function that makes one, or an exception to raise."""
Script = (
    Mapping[str, Answer | Sequence[Answer] | Mapping[str, float]]
    | Sequence[Answer]
    | Callable[[Generate], str]
)

EOS = 0
LIKELY, UNLIKELY = -0.1, -5.0
"""Log-probability a token of the scripted choice of a select, and of any other."""

_PIECES = re.compile(r"<\|\w+\|>| ?\w+| ?[^\w\s]|\s+?(?= ?\S)|\s+")


class ScriptedBackend:
    """Answers every generation from `answers`.

    Args:
        answers: A mapping whose keys are names of variables, or else regular expressions that are
            searched in the prompt (first match wins); or a list, used up in the order of the calls; or a
            function of the `Generate` request. In a mapping, a value may be a list, used up in order;
            and for a select, its choice, or a mapping of choices to their mean token log-probabilities.
        chat_format: Pieces of the chat template; None for a model without one. ChatML unless given.
        context_length: Most tokens of prompt and output together.

    An answer that its constraint does not allow, or that is longer than max_tokens under a constraint,
    fails the step. `requests` and `ended` record what was asked for.
    """

    def __init__(
        self,
        answers: Script,
        *,
        chat_format: ChatFormat | None = chatml(),  # noqa: B008 - frozen
        context_length: int = 1 << 20,
    ) -> None:
        self._answers = answers
        self._used: dict[str, int] = {}
        self._chat_format = chat_format
        self._context_length = context_length
        self._ids: dict[str, int] = {"<|im_end|>": EOS}
        self._texts: list[str] = ["<|im_end|>"]
        self._cached: dict[str, dict[int, Any]] = {}
        self._selected: weakref.WeakKeyDictionary[Call, Any] = weakref.WeakKeyDictionary()
        self.requests: list[Generate] = []
        self.ended: list[str] = []

    # --- the backend ---

    async def info(self) -> ModelInfo:
        return ModelInfo(
            name="scripted",
            path="",
            vocab_size=1 << 31,
            context_length=self._context_length,
            eos_token_ids=(EOS,),
            bos_token_id=None,
            dtype="none",
            device="none",
            chat_format=self._chat_format,
        )

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        self._refuse_unsupported(request)
        prompt = self.encode(request.prompt)
        wanted = request.sampling.max_tokens
        if len(prompt) + (wanted or 0) > self._context_length:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {wanted} to generate; context is {self._context_length}."
            )
        start = request.sampling.prompt_logprobs_start
        reusable = len(prompt) - 1 if start is None else min(len(prompt), start) - 1
        cached = max(0, min(self._match(request.scope, prompt), reusable))
        self._insert(request.scope, prompt)
        usage = Usage(prompt_tokens=len(prompt), cached_tokens=cached)
        if wanted == 0:
            scores = None if start is None else self._score(prompt, start)
            finish = Finish(reason="length")
            yield TextChunk(rid=request.rid, usage=usage, finish=finish, prompt_logprobs=scores)
            return
        text = self._answer(request)
        ids, kept, tail, finish = self._cut(text, request)
        self._insert(request.scope, prompt + ids[:-1])
        shown = self._visible(ids, kept, tail)
        forced = self._forced(request.constraint, ids[:kept])
        logprobs = request.sampling.logprobs
        for index, token in enumerate(ids):
            await asyncio.sleep(0)  # lets other requests go on, and cancellation in
            last = index == len(ids) - 1
            yield TextChunk(
                rid=request.rid,
                text=shown[index],
                ids=(token,),
                forced=(0,) if kept - forced <= index < kept else (),
                logprobs=None if logprobs is None else self._logprobs((token,), LIKELY, logprobs),
                prompt_logprobs=self._score(prompt, start) if start is not None and index == 0 else None,
                usage=Usage(
                    prompt_tokens=len(prompt),
                    cached_tokens=cached,
                    completion_tokens=index + 1,
                    forced_tokens=max(0, forced - max(0, kept - 1 - index)),
                ),
                finish=finish if last else None,
                kept_ids=kept if last else 0,
                tail=tail if last else "",
            )

    async def end_program(self, program: str) -> None:
        self.ended.append(program)

    async def aclose(self) -> None:
        """There is nothing to release."""

    def flush_cache(self) -> bool:
        """Forget every cached prefix."""
        self._cached.clear()
        return True

    # --- tokens ---

    def encode(self, prompt: Sequence[Segment]) -> list[int]:
        """Token ids; unknown pieces get the next free id."""
        ids: list[int] = []
        for segment in prompt:
            if isinstance(segment, str):
                ids.extend(self._id(piece) for piece in _PIECES.findall(segment))
            else:
                ids.extend(segment)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join([self._texts[token] for token in ids])

    def prompt_text(self, request: Generate) -> str:
        """The prompt of a request as text."""
        return self.decode(self.encode(request.prompt))

    def _id(self, piece: str) -> int:
        found = self._ids.setdefault(piece, len(self._texts))
        if found == len(self._texts):
            self._texts.append(piece)
        return found

    # --- the prefix cache: a trie of tokens for each scope ---

    def _match(self, scope: str, ids: Sequence[int]) -> int:
        node = self._cached.get(scope, {})
        for depth, token in enumerate(ids):
            if token not in node:
                return depth
            node = node[token]
        return len(ids)

    def _insert(self, scope: str, ids: Sequence[int]) -> None:
        node = self._cached.setdefault(scope, {})
        for token in ids:
            node = node.setdefault(token, {})

    # --- answers ---

    def _answer(self, request: Generate) -> str:
        call = CURRENT.get()
        found = self._look_up(call.name if call else "", request)
        if callable(found):
            found = found(request)
        if isinstance(found, BaseException):
            raise found
        if not isinstance(found, str):
            raise BackendError(f"The script answers with {found!r}, which is no text.")
        if request.constraint is not None:
            _check(found, request.constraint)
        return found

    def _look_up(self, name: str, request: Generate) -> Any:
        answers = self._answers
        if callable(answers):
            return answers
        if not isinstance(answers, Mapping):
            return self._next("", answers)
        if name and name in answers:
            return self._next(name, answers[name])
        prompt = self.prompt_text(request)
        for key, answer in answers.items():
            if re.search(key, prompt):
                return self._next(key, answer)
        raise BackendError(f"The script has no answer for {name or 'an unnamed step'!r}.")

    def _next(self, key: str, answer: Any) -> Any:
        if not isinstance(answer, Sequence) or isinstance(answer, str):
            return answer
        used = self._used.get(key, 0)
        if used == len(answer):
            raise BackendError(f"The script's {used} answers {f'for {key!r} ' if key else ''}are used up.")
        self._used[key] = used + 1
        return answer[used]

    def _cut(self, text: str, request: Generate) -> tuple[list[int], int, str, Finish]:
        """Output ids, how many of them are visible, the visible text after those, and the finish."""
        sampling = request.sampling
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        position, stop = min(found, default=(len(text), None))
        ids = self.encode([text])
        finish = Finish(reason="stop", matched=EOS)
        kept, tail = len(ids), ""
        if stop is not None:
            while len(self.decode(ids[:kept])) > position:
                kept -= 1
            tail = text[len(self.decode(ids[:kept])) : position]
            reached = kept
            while len(self.decode(ids[:reached])) < position + len(stop):
                reached += 1
            ids, finish = ids[:reached], Finish(reason="stop", matched=stop)
        else:
            ids = [*ids, EOS]
        most = len(ids) if sampling.max_tokens is None else sampling.max_tokens
        if len(ids) > most:
            if request.constraint is not None and kept > most:
                raise BackendError(f"The scripted answer has {kept} tokens; max_tokens is {most}.")
            ids, kept, tail, finish = ids[:most], min(kept, most), "", Finish(reason="length")
        if len(ids) < sampling.min_tokens:
            raise BackendError(
                f"The scripted answer has {len(ids)} tokens; min_tokens is {sampling.min_tokens}."
            )
        return ids, kept, tail, finish

    def _visible(self, ids: Sequence[int], kept: int, tail: str) -> list[str]:
        """The text that each output token shows."""
        shown = [self._texts[token] for token in ids[:kept]]
        hidden = [""] * (len(ids) - kept)
        if hidden:
            hidden[-1] = tail
        return shown + hidden

    def _forced(self, constraint: Constraint | None, ids: Sequence[int]) -> int:
        """Tokens after which only one choice was left; only choices force anything here."""
        if constraint is None or constraint.kind != "choices":
            return 0
        choices = json.loads(constraint.source)
        starts = [self.decode(ids[:count]) for count in range(len(ids))]
        return sum(sum(choice.startswith(start) for choice in choices) == 1 for start in starts)

    # --- log-probabilities ---

    def _score(self, prompt: Sequence[int], start: int) -> TokenLogprobs:
        """Of the prompt from `start` on: high where a select's scripted choice is scored."""
        call = CURRENT.get()
        value = LIKELY
        if call is not None and call.kind == "choice":
            preferred = self._preference(call)
            if isinstance(preferred, Mapping):
                value = preferred[call.name]
            else:
                value = LIKELY if call.name == preferred else UNLIKELY
        scores = self._logprobs(tuple(prompt[start:]), value, 0)
        if start == 0 and scores.ids:
            return TokenLogprobs(ids=scores.ids, logprobs=(None, *scores.logprobs[1:]), texts=scores.texts)
        return scores

    def _preference(self, call: Call) -> Any:
        """The scripted choice of the select that `call` belongs to, looked up once for all its choices."""
        step = call.parent
        assert step is not None
        if step not in self._selected:
            found = self._look_up(step.name, self.requests[-1])
            self._selected[step] = found(self.requests[-1]) if callable(found) else found
        found = self._selected[step]
        if isinstance(found, BaseException):
            raise found
        known = [other.name for other in step.children if other.kind == "choice"]
        for choice in found if isinstance(found, Mapping) else [found]:
            if choice not in known:
                raise BackendError(f"The script selects {choice!r}, which is none of the choices.")
        return found

    def _logprobs(self, ids: tuple[int, ...], value: float, top: int) -> TokenLogprobs:
        texts = tuple(self._texts[token] for token in ids)
        return TokenLogprobs(
            ids=ids,
            logprobs=(value,) * len(ids),
            texts=texts,
            top=tuple(((token, value),) for token in ids) if top else (),
            top_texts=tuple((text,) for text in texts) if top else (),
        )

    def _refuse_unsupported(self, request: Generate) -> None:
        for option in ("ignore_eos", "logit_bias", "stop_token_ids"):
            if getattr(request.sampling, option):
                raise UnsupportedNode(f"A scripted backend has no {option}.", field=option)
        if request.chat is not None:
            raise UnsupportedNode("A scripted backend takes prompts, not messages.", field="chat")


def _check(text: str, constraint: Constraint) -> None:
    """Raise `BackendError` unless `constraint` allows `text`."""
    check = _CHECKS.get(constraint.kind)
    if check is None:
        raise UnsupportedNode(f"A scripted backend cannot check a constraint of kind {constraint.kind}.")
    problem = check(text, constraint.source)
    if problem:
        raise BackendError(f"The scripted answer {text!r} breaks its {constraint.kind}: {problem}.")


def _check_choices(text: str, source: str) -> str | None:
    return None if text in json.loads(source) else f"it is none of {source}"


def _check_regex(text: str, source: str) -> str | None:
    return None if re.fullmatch(source, text) else f"it does not match {source}"


def _check_object(text: str, source: str) -> str | None:
    try:
        return None if isinstance(json.loads(text), dict) else "it is no object"
    except ValueError as error:
        return str(error)


def _check_schema(text: str, source: str) -> str | None:
    try:
        import jsonschema
    except ImportError:
        raise BackendError(
            "A scripted answer under a JSON schema is checked with jsonschema, which is not installed.",
            remedy="pip install jsonschema",
        ) from None
    try:
        jsonschema.validate(json.loads(text), json.loads(source))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def _check_structural_tag(text: str, source: str) -> str | None:
    try:
        return check_tag(text, source, _check_schema)
    except NotImplementedError as unknown:
        raise UnsupportedNode(
            f"A scripted backend cannot check the format {unknown} of a structural tag."
        ) from None


_CHECKS: dict[str, Callable[[str, str], str | None]] = {
    "choices": _check_choices,
    "regex": _check_regex,
    "json_object": _check_object,
    "json_schema": _check_schema,
    "structural_tag": _check_structural_tag,
}
