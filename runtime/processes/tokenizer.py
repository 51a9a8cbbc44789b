"""The tokenizer process: prompts and chat templates become token ids."""

from __future__ import annotations

import itertools
import json
import logging
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ramify.decisions.checks import check_decide, check_template_variables
from ramify.decisions.layouts import BLANK_LINE, PLAIN_CLOSING, Layout
from ramify.decisions.trained import Other, trained
from ramify.engine_messages import (
    Detokenize,
    Failed,
    Ready,
    Submit,
    Texts,
    TokenIds,
    Tokenize,
    ToTokenizer,
)
from ramify.errors import InvalidRequest, RamifyError, UnsupportedField
from ramify.fill import Fill
from ramify.messages import Generate, Preamble, Segment
from ramify.model_info import ChatFormat
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.tokenizer.fill import FillFormat, fill_format
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.chat_rendering import TEMPLATE_S, ChatRenderer
from ramify.runtime.processes.choice_tokens import ChoiceTokenizer, check_choices, check_pooling
from ramify.runtime.processes.decision_tokens import (
    DecisionTokenizer,
    Surroundings,
    cut_at_place,
    with_place,
)
from ramify.runtime.processes.flow_queue import FlowQueue
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets
from ramify.runtime.processes.message_texts import MARK, MessageTexts
from ramify.runtime.processes.trained_layout import trained_layout
from ramify.runtime.processes.worker_process import reporting_start_up, take_orders
from ramify.runtime.processes.worker_start import finish_startup

log = logging.getLogger("ramify")

CACHED_CHARACTERS = 4_000_000
"""Maximum total length, in characters, of the texts whose token ids are cached."""
CACHED_FROM = 24
"""Minimum characters of a text whose token ids are cached: tokenising shorter texts again is cheaper."""


class PromptTokenizer:
    """Turns the prompt of a `Generate` into ids. `tokenizer` is a fast transformers tokenizer.

    metadata : that of the model's GGUF file
    special_in_messages : see `EngineConfig.special_tokens_in_messages`
    trained : the layout of questions that the checkpoint was trained with
    template_s, cached_characters : the limits `TEMPLATE_S` and `CACHED_CHARACTERS`
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_in_messages: bool = True,
        metadata: Mapping[str, Any] = MappingProxyType({}),
        trained: Layout | None = None,
        template_s: float = TEMPLATE_S,
        cached_characters: int = CACHED_CHARACTERS,
    ) -> None:
        self._tokenizer = tokenizer
        self._metadata = metadata
        self._most_cached = cached_characters
        self._messages = None if special_in_messages else MessageTexts(tokenizer)
        self._chats = ChatRenderer(tokenizer, self._messages, template_s)
        self._bos: int | None = tokenizer.bos_token_id
        self._decisions = DecisionTokenizer(
            self._encode_inside, str if self._messages is None else self._messages.marked_values, trained
        )
        self._cache: OrderedDict[tuple[str, bool, str], array[int]] = OrderedDict()
        """(text, whether it begins the prompt, cache scope) → ids, least recently used first. A program sends
        its earlier turns again with every call. Scopes are kept apart, since a cached text takes less
        time."""
        self._scope = ""
        """The cache scope of the request whose prompt is tokenised."""
        self._cached_characters = 0

    def results(self, message: Generate | Tokenize | Detokenize) -> Iterator[Submit | Texts | None]:
        """The result of `message`, after a None between two slices of long work."""
        match message:
            case Generate():
                yield from self._submit(message)
            case Tokenize():
                yield self.tokenize(message)
            case Detokenize():
                yield self.detokenize(message)

    def submit(self, request: Generate) -> Submit:
        """Tokenise a request. Raises `InvalidRequest` for an empty prompt, for wrong choices or preambles,
        and if the chat template raises. Raises `UnsupportedField` for options that have no effect."""
        return next(found for found in self._submit(request) if found is not None)

    def _submit(self, request: Generate) -> Iterator[Submit | None]:
        self._scope = request.scope
        choices = check_choices(request)
        check_pooling(request)
        decide = check_decide(request)
        if request.thinking is not None:
            raise UnsupportedField("A prompt takes preambles, not thinking.", field="thinking")
        templated = request.chat is not None
        prompt, around = self._segments(request)
        ids = self._ids(request, prompt, special=not templated and not (around and around.bare))
        submit = Submit(
            rid=request.rid,
            ids=tuple(ids),
            forks=self._forks(request, prompt, ids),
            sampling=request.sampling,
            cut_to_fit=request.cut_to_fit,
            pooling=request.pooling,
            hint=request.hint,
            scope=request.scope,
            lora=request.lora,
            lora_revision=request.lora_revision,
            every_s=request.every_s,
            priority=request.priority,
            flow=request.flow,
            key=request.key,
            continues=request.continues,
        )
        if choices is not None:
            healing = request.sampling.token_healing
            tokenizer = ChoiceTokenizer(
                self._encode,
                self._encode_joint,
                prompt,
                len(ids),
                exact=templated or not healing,
                templated=templated,
            )
            yield msgspec.structs.replace(
                submit,
                choices=tuple([tokenizer.tokens(choice) for choice in choices.texts]),
                unconditional=choices.unconditional,
            )
            return
        if decide is not None and around is not None:
            tokens = None
            for tokens in self._decisions.tokens(decide, around):
                if tokens is None:
                    yield None
            submit = msgspec.structs.replace(submit, decide=tokens)
        if not ids:
            raise InvalidRequest(
                "The prompt is empty.", field="prompt", remedy="Send at least one character or token."
            )
        preambles = tuple(self._with_end_ids(request.preambles))
        sampling = request.sampling
        if request.fill is not None and not sampling.ignore_eos:
            ends = dict.fromkeys((*sampling.stop_token_ids, *self._fill_format.ends))
            sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(ends))
        channels = templated and self._chats.has_channels
        if channels or any(token in self._control for preamble in preambles for token in preamble.end_ids):
            # The frontend's parsers look for the ends of preambles, and for channels, in the text.
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        yield msgspec.structs.replace(
            submit,
            sampling=sampling,
            constraint=request.constraint,
            preambles=preambles,
            open_end=_ends_in_text(request) and not preambles and request.fill is None,
        )

    def tokenize(self, message: Tokenize) -> Texts:
        """The ids of the message's prompts. Raises `InvalidRequest` if the chat template raises."""
        ids = []
        for prompt in message.prompts:
            self._scope = prompt.scope
            ids.append(self._ids(prompt, self._segments(prompt)[0], special=message.special))
        tokens = self._tokenizer.convert_ids_to_tokens if message.entries else lambda one: ()
        return Texts(
            rid=message.rid,
            prompts=tuple([TokenIds(ids=tuple(one), tokens=tuple(tokens(one))) for one in ids]),
        )

    def detokenize(self, message: Detokenize) -> Texts:
        """The texts of the message's lists of ids."""

        def texts(skip: bool) -> tuple[str, ...]:
            return tuple([str(self._tokenizer.decode(ids, skip_special_tokens=skip)) for ids in message.ids])

        return Texts(rid=message.rid, whole=texts(False), text=texts(message.skip_special_tokens))

    def _segments(self, request: Generate) -> tuple[tuple[Segment, ...], Surroundings | None]:
        """(segments of the prompt, texts around each question). A chat is rendered by the chat template."""
        decide = request.decide
        if decide is None:
            return (request.prompt if request.chat is None else (self._chats.render(request),)), None
        layout = self._decisions.layout(decide)
        if layout is not None and layout.state is not None:
            for field in ("tools", "template_kwargs"):
                if getattr(request, field):
                    raise UnsupportedField(
                        f"{field} has no effect in the layout that this checkpoint was trained with.",
                        field=field,
                        remedy="Leave it out, or name another layout.",
                    )
            return layout.state(self._chats.marked(request)), Surroundings("", "", bare=True)
        prompt, around = request.prompt, Surroundings(BLANK_LINE, PLAIN_CLOSING)
        if request.chat is not None:
            check_template_variables(json.loads(request.template_kwargs or "{}"))
            chat, opening = with_place(request.chat)
            rendered = self._chats.render(
                msgspec.structs.replace(request, chat=chat), **dict.fromkeys(SWITCHES, False)
            )
            form = self.chat_format
            state, around = cut_at_place(rendered, opening, None if form is None else form.thinking)
            prompt = (state,)
        return prompt, Surroundings(
            around.opening if decide.opening is None else decide.opening,
            around.closing if decide.closing is None else decide.closing,
        )

    def _ids(self, request: Generate, prompt: tuple[Segment, ...], *, special: bool) -> list[int]:
        """The ids of the segments `prompt`, and of the start of the first preamble."""
        if request.fill is not None:
            return self._filled("".join(map(str, prompt)), request.fill)
        ids = self._join(prompt, templated=not special)
        if request.preambles and (start := request.preambles[0].start) and not self._ends_in(ids, start):
            ids = self._join((*prompt, start), templated=not special)
        if request.decide is not None and not ids:  # an empty state: the beginning, or the end before it
            first = self._tokenizer.eos_token_id if self._bos is None else self._bos
            return [] if first is None else [first]
        return ids

    @property
    def chat_format(self) -> ChatFormat | None:
        """The chat template as pieces; None if there is none."""
        return self._chats.format

    def _filled(self, prefix: str, fill: Fill) -> list[int]:
        """The ids of a prompt to fill in the middle. Raises `UnsupportedField` if the model cannot do so."""
        ids = self._fill_format.ids(
            prefix, fill, lambda text: self._encode(text, False), lambda text: self._encode_inside([text])[0]
        )
        started = self._bos is not None and self._tokenizer.encode("a")[0] == self._bos
        return [self._bos, *ids] if started and self._bos is not None else ids

    @cached_property
    def _fill_format(self) -> FillFormat:
        return fill_format(self._tokenizer, self._metadata)

    def _encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without the space that SentencePiece puts before a text."""
        before, alone = self._before
        found = self._tokenizer.backend_tokenizer.encode_batch_fast(
            [before + text for text in texts], add_special_tokens=False
        )
        return [
            self._encode(text, False)
            if (self._messages is not None and MARK in text) or (ids := one.ids)[: len(alone)] != alone
            else ids[len(alone) :]
            for text, one in zip(texts, found, strict=True)
        ]

    @cached_property
    def _before(self) -> tuple[str, list[int]]:
        """(a text, its ids), to be put before texts if the tokenizer adds a space at the beginning; else two
        empty ones."""
        mark = "☺"
        alone = self._tokenizer.encode(mark, add_special_tokens=False)
        spaced = self._tokenizer.convert_ids_to_tokens(alone[0]).startswith("▁")
        return (mark, alone) if spaced else ("", [])

    def _forks(self, request: Generate, prompt: tuple[Segment, ...], ids: list[int]) -> tuple[int, ...]:
        """Numbers of ids after which later prompts are expected to diverge from this one: at the places that
        the hint names, and after the last message of a chat, or, if questions are asked, after the last id.

        A number is found by tokenising the text after the place, and comparing its tokens with the end of
        `ids`.
        """
        tails: list[tuple[Segment, ...]] = []
        for index, characters in () if request.hint is None else request.hint.parts:
            cut = [part[characters:] if isinstance(part, str) else part for part in prompt[index : index + 1]]
            tails.append((*cut, *prompt[index + 1 :]))
        asked = request.decide is not None
        if request.chat and not asked and (content := request.chat[-1].content.strip()):
            if self._messages is not None:
                content = self._messages.marked_values(content)
            _, found, tail = str(prompt[0]).rpartition(content)
            tails += [(tail,)] if found else []
        forks = {len(ids)} if asked else set()  # all questions diverge at the end
        for segments in tails:
            expected = self._join(segments, templated=True)
            same = 0
            while same < min(len(expected), len(ids)) and expected[-same - 1] == ids[-same - 1]:
                same += 1
            if same or not expected:
                # A token may span the place, in this prompt or in a later prompt.
                forks.add(len(ids) - same - (1 if same == len(expected) else 2))
        return tuple(sorted(fork for fork in forks if fork > 0))

    def _ends_in(self, ids: list[int], text: str) -> bool:
        tail = ids[-len(text) - 8 :]  # a token has at least one character; 8 more allow for white space
        return str(self._tokenizer.decode(tail)).rstrip().endswith(text.rstrip())

    def _with_end_ids(self, preambles: Iterable[Preamble]) -> Iterator[Preamble]:
        """The preambles with the token ids of their ends. If a preamble without free text (max_tokens 0) has
        an end with control tokens, it is divided into several: one for each control token, and one for each
        text between them."""
        for preamble in preambles:
            if not preamble.end or (preamble.uncounted and preamble.max_tokens is None):
                raise InvalidRequest(
                    "A preamble lacks its end, or is apart, not counted, and has no max_tokens.",
                    field="preambles",
                )
            ids = self._encode(preamble.end, False)
            if len(ids) == 1 or self._control.isdisjoint(ids):
                yield msgspec.structs.replace(preamble, end_ids=tuple(ids))
                continue
            if preamble.max_tokens != 0:
                raise InvalidRequest(
                    f"The end {preamble.end!r} mixes a control token of this model with text.",
                    field="reasoning.end",
                    remedy="Use the control token alone.",
                )
            for control, run in itertools.groupby(ids, self._control.__contains__):
                for part in [(token,) for token in run] if control else [tuple(run)]:
                    end = str(self._tokenizer.decode(part))
                    yield msgspec.structs.replace(preamble, end=end, end_ids=part)

    @cached_property
    def _control(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        return frozenset(token for token, entry in added.items() if entry.special)

    def _join(self, prompt: tuple[Segment, ...], *, templated: bool) -> list[int]:
        """The ids of the segments. `templated`: the chat template has written the beginning of the prompt, so
        no beginning-of-sequence token is added."""
        ids: list[int] = []
        text = ""
        for segment in (*prompt, ()):
            if isinstance(segment, str):
                text += segment  # a token may span two neighbouring texts
                continue
            if text:
                ids += self._encode(text, not ids and not templated)
                text = ""
            ids += segment
        return ids

    def _encode(self, text: str, start: bool) -> list[int]:
        """The ids of `text`. `start`: the text begins the prompt."""
        cached = self._cache.get((text, start, self._scope))
        if cached is not None:
            self._cache.move_to_end((text, start, self._scope))
            return cached.tolist()
        ids: list[int]
        if self._messages is not None and MARK in text and not start:
            ids = self._messages.encode(text)
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=start)
        if start and self._has_two_bos(ids):
            del ids[0]
        if len(text) >= CACHED_FROM:
            self._cache[text, start, self._scope] = array("i", ids)
            self._cached_characters += len(text)
            while self._cached_characters > self._most_cached:
                (old, _, _), _ = self._cache.popitem(last=False)
                self._cached_characters -= len(old)
        return ids

    def _encode_joint(self, text: str, start: bool) -> tuple[list[int], list[int]]:
        """Do as `_encode`, and also return the position in `text`, in characters, of each token's end."""
        found = self._tokenizer(text, add_special_tokens=start, return_offsets_mapping=True)
        ids, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
        return (ids[1:], ends[1:]) if start and self._has_two_bos(ids) else (ids, ends)

    def _has_two_bos(self, ids: list[int]) -> bool:
        """Whether `ids` begin with two beginning-of-sequence tokens, since the text spells one and the
        tokenizer has added another."""
        return self._bos is not None and ids[:2] == [self._bos, self._bos]


def _ends_in_text(request: Generate) -> bool:
    """Whether the prompt ends in a text that the output continues."""
    if request.chat is None:
        return bool(request.prompt) and isinstance(request.prompt[-1], str)
    return bool(json.loads(request.template_kwargs or "{}").get("continue_final_message"))


class _Work(NamedTuple):
    """A message whose work has begun."""

    rid: str
    results: Iterator[Submit | Texts | None]


def main() -> None:
    orders = take_orders("tokenizer")
    sockets = Sockets(Path(orders.sockets))
    scheduler, frontend = Outbox(sockets.scheduler), Outbox(sockets.frontend)

    def refuse(rid: str, why: str) -> None:
        error = InvalidRequest(f"The request cannot be read: {why}.")
        frontend.send(Failed(rid=rid, error=error.to_info()))

    inbox: Inbox[ToTokenizer] = Inbox(sockets.tokenizer, ToTokenizer, refuse)
    with reporting_start_up("tokenizer", frontend):
        tokenizer = load_tokenizer(Path(orders.tokenizer))
        weights = Path(orders.weights)
        metadata = {} if weights.is_dir() else read_header(weights).metadata
        found = trained(weights, metadata)
        if isinstance(found, Other):
            log.warning("This is %s (%s): decisions need a named layout.", found.kind, found.source)
        prompts = PromptTokenizer(
            tokenizer,
            special_in_messages=orders.config.special_tokens_in_messages,
            metadata=metadata,
            trained=trained_layout(found, tokenizer),
        )
        ready = Ready(
            role="tokenizer",
            pid=os.getpid(),
            chat_format=prompts.chat_format,
            special_tokens={
                name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
            },
        )
    frontend.send(ready)
    finish_startup()
    queue = FlowQueue()
    while True:
        encoded = inbox.recv_encoded(wait=not queue)
        while encoded is not None:
            queue.put(encoded)
            encoded = inbox.recv_encoded(wait=False)
        work = queue.take()
        if isinstance(work, bytes):
            message = inbox.decode(work)
            if message is None:
                continue
            if not isinstance(message, Generate | Tokenize | Detokenize):
                scheduler.send(message)
                continue
            work = _Work(message.rid, prompts.results(message))
        if work is None:
            continue
        try:
            result = next(work.results)
        except RamifyError as error:
            frontend.send(Failed(rid=work.rid, error=error.to_info()))
        except Exception as error:
            log.exception("tokenising %s failed", work.rid)
            failure = RamifyError(f"Tokenising failed: {error}")
            frontend.send(Failed(rid=work.rid, error=failure.to_info()))
        else:
            if result is None:
                queue.put_back(work)
            else:
                (scheduler if isinstance(result, Submit) else frontend).send(result)
