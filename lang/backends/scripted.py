"""A backend that answers from a script, so that programs can be tested without a model.

The backend has a tokenizer whose tokens are words and punctuation, each with the space before it. Cached
tokens are counted as by a radix tree with pages of one token. The backend is deterministic, streams, and
answers at once.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from ramify.constraint import Constraint
from ramify.decisions.layouts import BLANK_LINE, PLAIN_CLOSING
from ramify.errors import PromptTooLong, UnsupportedNode
from ramify.lang.backends.answer_check import refuse_stops
from ramify.lang.backends.script import (
    Answer,
    Answers,
    NotScripted,
    Script,
    Step,
    scores_of,
    text_of,
    uniform,
)
from ramify.lang.prompt.chat import chatml
from ramify.lang.prompt.thinking import PLAIN
from ramify.lang.trace.calls import CURRENT
from ramify.messages import (
    ChoiceScore,
    Finish,
    Generate,
    Segment,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.model_info import ChatFormat, ModelInfo
from ramify.questions import Decide, DecisionScores, Question, QuestionScores
from ramify.spelling import nearest

EOS = 0
LIKELY, UNLIKELY = -0.1, -5.0
"""Log-probabilities of a token of the scripted choice of a select, and of a token of any other choice."""

_PIECES = re.compile(r"<\|\w+\|>| ?\w+| ?[^\w\s]|\s+?(?= ?\S)|\s+")


class ScriptedBackend:
    """A backend that answers every request from `answers`.

    Args:
        answers: A list, a mapping, or a function from the `Generate` request to its answer. A list has one
            answer for each request, in order. A mapping is looked up by the name of the step's variable. If
            no key is that name, the keys that are not the name of another step are searched in the prompt as
            regular expressions, and the first match wins. A value of a mapping may be a list of answers,
            which are used in order.
        chat_format: The chat template as pieces. Default: ChatML. None: a model without a chat template.
        context_length: Most tokens that prompt and output may have together.
        name: The model's name.
        strict: If the script has no answer to a step, or an answer that no model could give, True (the
            default) ends the run: `run` raises `NotScripted`, even if the program recovers from failed steps.
            With False only the step fails.

    An answer is a text; an exception, which is raised; or a function of the request that makes an answer. For
    a step with a schema it may be a value (a pydantic object, a dataclass, a dict, a number, …), which
    becomes the JSON that the schema allows. For `call_tools` it may be a `ToolCall`, a dict
    ``{"name": …, "arguments": {…}}`` or a list of these. For a select it is the choice, or a mapping from all
    choices to their mean token log-probabilities.

    For a decide it is the value, which gets probability 1, or a mapping from values to probabilities, whose
    sum is the option mass: ``True``, ``"billing"``, ``{"billing": 0.7, "returns": 0.1}``; for a decide about
    a model, an instance or a mapping from fields to such answers. Each decide takes an answer of its own,
    also if several are one request; a function is called for each with the part of the request that asks its
    questions.

    For a `gen` with thinking, a text may begin with thoughts between the marks of the chat template, such as
    ``"<think>2 + 2</think>4"`` with ChatML. Thoughts are cut to their max_tokens.

    No model could give an answer that the step's constraint does not allow, such as a call of an unknown
    tool, or one that is longer than max_tokens under a constraint, or shorter than min_tokens. An answer that
    is an exception fails the step in either case. `requests` records all requests, and `ended` all programs
    that have ended.
    """

    priority: int | None = None

    def __init__(
        self,
        answers: Answers,
        *,
        chat_format: ChatFormat | None = chatml(),  # noqa: B008 - frozen
        context_length: int = 1 << 20,
        name: str = "scripted",
        strict: bool = True,
    ) -> None:
        self.strict = strict
        self._script = Script(answers)
        self._chat_format = chat_format
        self._context_length = context_length
        self._name = name
        self._models: dict[str, ScriptedBackend] = {name: self}
        """Name → backend of this model, shared by all of them."""
        self._ids: dict[str, int] = {"<|im_end|>": EOS}
        self._texts: list[str] = ["<|im_end|>"]
        self._cached: dict[str, dict[int, Any]] = {}
        self.requests: list[Generate] = []
        self.ended: list[str] = []

    def model(self, name: str) -> ScriptedBackend:
        """The same script as the model `name`, with a prefix cache of its own. Any name is known."""
        if name not in self._models:
            other = self._models[name] = copy.copy(self)
            other._name, other._cached = name, {}
        return self._models[name]

    # --- the backend ---

    async def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._name,
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
        try:
            async with aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except NotScripted as error:
            error.fatal = self.strict
            raise

    async def _chunks(self, request: Generate) -> AsyncGenerator[TextChunk, None]:
        self.requests.append(request)
        self._refuse_unsupported(request)
        prompt = self.encode(request.prompt)
        wanted = request.sampling.max_tokens
        if len(prompt) + (wanted or 0) > self._context_length:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens and {wanted} to generate; context is {self._context_length}."
            )
        if request.choices is not None:
            yield self._scored(request, prompt)
            return
        if request.decide is not None:
            yield self._decided(request, request.decide, prompt)
            return
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
        before, text = _split(self._answer(request), request)
        ids, kept, tail, finish = self._cut(text, request)
        thoughts = self._thoughts(before, request)
        ids, kept = thoughts + ids, len(thoughts) + kept
        self._insert(request.scope, prompt + ids[:-1])
        shown = self._visible(ids, kept, tail)
        forced = self._forced(request.constraint, ids[len(thoughts) : kept])
        logprobs = request.sampling.logprobs
        for index, token in enumerate(ids):
            await asyncio.sleep(0)  # yields to other requests and to cancellation
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
        """The token ids of `prompt`. A token that the vocabulary does not have yet gets the next free id."""
        ids: list[int] = []
        for segment in prompt:
            if isinstance(segment, str):
                ids.extend(self._id(piece) for piece in _PIECES.findall(segment))
            else:
                ids.extend(segment)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. An id that is not in the vocabulary becomes U+FFFD."""
        texts = self._texts
        return "".join([texts[token] if token < len(texts) else "\ufffd" for token in ids])

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
        _insert(self._cached.setdefault(scope, {}), ids)

    # --- answers ---

    @property
    def unused(self) -> list[tuple[str | int, Answer]]:
        """(key or index, answer) of each answer that was not used. A test may assert that the list is
        empty."""
        return self._script.unused

    def _answer(self, request: Generate) -> str:
        step = self._step(request)
        found, before = self._script.next(step), ""
        if isinstance(found.answer, str):
            before, answer = _split(found.answer, request)
            found = dataclasses.replace(found, answer=answer)
        return before + text_of(found, step)

    def _thoughts(self, before: str, request: Generate) -> list[int]:
        """Token ids of the thoughts in `before`, cut to their max_tokens, and of the marks that follow."""
        if not request.preambles:
            return []
        first = request.preambles[0]
        marks = self._chat_format.thinking if self._chat_format is not None else None
        words = before.removesuffix(first.end).removeprefix((marks or PLAIN).start.rstrip())
        thoughts = self.encode([words.removeprefix("\n")])[: first.max_tokens]
        return thoughts + self.encode([preamble.end for preamble in request.preambles])

    def _step(self, request: Generate) -> Step:
        call = CURRENT.get()
        return Step(
            name=call.name if call is not None else "",
            number=len(self.requests),
            request=request,
            prompt=self.prompt_text(request),
            form=call.form if call is not None else None,
        )

    def _cut(self, text: str, request: Generate) -> tuple[list[int], int, str, Finish]:
        """Cut `text` at stop strings and limits; returns the output ids, the number of leading ids whose text
        is visible, the visible text after these ids, and the finish."""
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
                raise NotScripted(f"The scripted answer has {kept} tokens; max_tokens is {most}.")
            ids, kept, tail, finish = ids[:most], min(kept, most), "", Finish(reason="length")
        if len(ids) < sampling.min_tokens:
            raise NotScripted(
                f"The scripted answer has {len(ids)} tokens; min_tokens is {sampling.min_tokens}."
            )
        return ids, kept, tail, finish

    def _visible(self, ids: Sequence[int], kept: int, tail: str) -> list[str]:
        """The visible text of each output token: its own text for the first `kept` tokens, `tail` for the
        last token, and no text for the others."""
        shown = [self._texts[token] for token in ids[:kept]]
        hidden = [""] * (len(ids) - kept)
        if hidden:
            hidden[-1] = tail
        return shown + hidden

    def _forced(self, constraint: Constraint | None, ids: Sequence[int]) -> int:
        """Number of forced tokens: under a constraint of choices, the tokens before which only one choice was
        left; under any other constraint, 0."""
        if constraint is None or constraint.kind != "choices":
            return 0
        choices = json.loads(constraint.source)
        starts = [self.decode(ids[:count]) for count in range(len(ids))]
        return sum(sum(choice.startswith(start) for choice in choices) == 1 for start in starts)

    # --- log-probabilities ---

    def _score(self, prompt: Sequence[int], start: int) -> TokenLogprobs:
        scores = self._logprobs(tuple(prompt[start:]), LIKELY, 0)
        if start:
            return scores
        return msgspec.structs.replace(scores, logprobs=(None, *scores.logprobs[1:])[: len(scores.ids)])

    # --- choices ---

    def _scored(self, request: Generate, prompt: list[int]) -> TextChunk:
        """The scores of a select's choices. The scripted choice has the highest."""
        assert request.choices is not None
        preferred = self._preference(request)
        scores, paths, states = [], [], []
        for choice in request.choices.texts:
            shared, ids, dropped = self._behind(request, prompt, choice)
            own = tuple(ids[dropped:])
            # The first token of a prompt has a log-probability here: a choice may have no other token.
            tokens, alone = self._logprobs(own, preferred[choice], 0), None
            paths.append(prompt[:shared] + ids[:-1])
            states.append(shared + dropped - 1)
            if request.choices.unconditional:
                alone = self._logprobs(own, LIKELY, 0)
                paths.append(list(own[:-1]))
            scores.append(ChoiceScore(tokens=tokens, behind=shared == len(prompt), unconditional=alone))
        found = self._match(request.scope, paths[0][: max(min(states), 0)])
        computed: dict[int, Any] = {}
        count = sum(_insert(computed, path) for path in paths)
        for path in paths:
            self._insert(request.scope, path)
        usage = Usage(prompt_tokens=count, cached_tokens=found)
        return TextChunk(rid=request.rid, usage=usage, finish=Finish(reason="length"), choices=tuple(scores))

    # --- decisions ---

    def _decided(self, request: Generate, decide: Decide, prompt: list[int]) -> TextChunk:
        """The scores of questions: the scripted ones, or equal ones behind an empty state ("pmi")."""
        call = CURRENT.get()
        asked = call.asked if call is not None else (("", ("",)),) * len(decide.questions)
        questions = iter(decide.questions)
        found: list[QuestionScores] = []
        with self._script.whole():
            for name, fields in asked:
                own = tuple(itertools.islice(questions, len(fields)))
                if call is not None and call.kind == "prior":
                    found += map(uniform, own)
                    continue
                narrowed = msgspec.structs.replace(decide, questions=own)
                step = self._step(msgspec.structs.replace(request, decide=narrowed))
                taken = self._script.next(dataclasses.replace(step, name=name))
                found += scores_of(taken, fields, own)
        behind = sum(len(self.encode(_words(question, decide))) for question in decide.questions)
        usage = Usage(prompt_tokens=len(prompt) + behind, cached_tokens=self._match(request.scope, prompt))
        self._insert(request.scope, prompt)
        scores = DecisionScores(questions=tuple(found))
        return TextChunk(rid=request.rid, usage=usage, finish=Finish(reason="length"), decisions=scores)

    def _behind(self, request: Generate, prompt: list[int], choice: str) -> tuple[int, list[int], int]:
        """The tokens of `prompt` followed by `choice`: (number of prompt tokens kept, ids that follow, number
        of these ids that spell the end of the prompt). Token healing may replace the last token of the
        prompt."""
        last = request.prompt[-1] if request.prompt else None
        if not isinstance(last, str) or not request.sampling.token_healing:
            return len(prompt), self.encode((choice,)), 0
        joint = self.encode((*request.prompt[:-1], last + choice))
        shared = next(
            (i for i, pair in enumerate(zip(prompt, joint, strict=False)) if pair[0] != pair[1]), len(prompt)
        )
        dropped, border = 0, len(self.decode(prompt))
        while len(self.decode(joint[: shared + dropped + 1])) <= border:
            dropped += 1
        return shared, joint[shared:], dropped

    def _preference(self, request: Generate) -> Mapping[str, float]:
        """The log-probability of each token of each choice of a select, by the script. All choices are equal
        outside a program."""
        assert request.choices is not None
        texts = request.choices.texts
        if CURRENT.get() is None:
            return dict.fromkeys(texts, LIKELY)
        found = self._script.next(self._step(request))
        answer = found.answer
        for choice in answer if isinstance(answer, Mapping) else [answer]:
            if choice not in texts:
                raise NotScripted(
                    f"The script selects {choice!r}, which is none of the choices "
                    f"{', '.join(map(repr, texts))}. {found.place}",
                    remedy=nearest(str(choice), texts),
                )
        if not isinstance(answer, Mapping):
            return {text: LIKELY if text == answer else UNLIKELY for text in texts}
        for text in texts:
            score = answer.get(text)
            if not isinstance(score, int | float) or not score <= 0:
                raise NotScripted(
                    f"The script gives the choice {text!r} the score {score!r}. {found.place}",
                    remedy="Give each choice a mean log-probability, which is at most 0, or name one choice.",
                )
        return answer

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
        # Blank stop strings are those of the number types; without them most scripts need no grammar (0.7 s).
        stops = tuple(stop for stop in request.sampling.stop if stop.strip())
        if request.constraint is not None and stops:
            refuse_stops(request.constraint, stops)
        if request.chat is not None:
            raise UnsupportedNode("A scripted backend takes prompts, not messages.", field="chat")


def _words(question: Question, decide: Decide) -> list[str]:
    """The texts of a question whose tokens are counted."""
    options = [text for one in question.options for text in (one.name, one.description)]
    opening, closing = decide.opening or BLANK_LINE, decide.closing or PLAIN_CLOSING
    return [opening, question.instructions, *options, closing]


def _split(text: str, request: Generate) -> tuple[str, str]:
    """Split `text` into the thoughts, with their end mark, and the answer. The thoughts are empty if `text`
    has no end mark."""
    if not request.preambles:
        return "", text
    first, *rest = [preamble.end for preamble in request.preambles]
    words, end, answer = text.partition(first)
    return (words + end, answer.removeprefix("".join(rest))) if end else ("", text)


def _insert(tree: dict[int, Any], ids: Sequence[int]) -> int:
    """Insert `ids` into `tree`, a trie of tokens; returns the number of new nodes."""
    new = 0
    for token in ids:
        new += token not in tree
        tree = tree.setdefault(token, {})
    return new
