"""The detokenizer process: turns output ids into text, and ends requests at their stop strings."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from ramify.engine_messages import Abort, Failed, Ready, StepOutput, StepText, ToDetokenizer, TokenChunk
from ramify.errors import EngineError, RamifyError
from ramify.messages import ChoiceScore, Finish, TextChunk, TokenLogprobs, Usage, concatenated
from ramify.runtime.model.tokenizer.tokenizer import load_backend
from ramify.runtime.processes.ipc import Inbox, Outbox, Sockets
from ramify.runtime.processes.text_stream import TextStream
from ramify.runtime.processes.worker_process import reporting_start_up, take_orders
from ramify.runtime.processes.worker_start import finish_startup
from ramify.text import token_text

log = logging.getLogger("ramify")


class Detokenizer:
    """Turns token ids into text.

    `abort` is called with the id of a request that ends at a stop string or by an error. `fail` is called
    with the error of a request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        abort: Callable[[str], None],
        fail: Callable[[Failed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode = tokenizer.decode
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        self._abort = abort
        self._fail = fail
        self._clock = clock
        self._outputs: dict[str, _Output] = {}
        self._token_texts: dict[int, str] = {}

    def step(self, output: StepOutput) -> StepText | None:
        """The text of one step; None if all of it is held back."""
        chunks = [text for chunk in output.chunks if (text := self._chunk_or_failure(chunk)) is not None]
        return StepText(chunks=tuple(chunks)) if chunks else None

    def forget(self, rid: str) -> None:
        self._outputs.pop(rid, None)

    def _chunk_or_failure(self, chunk: TokenChunk) -> TextChunk | None:
        try:
            return self._chunk(chunk)
        except Exception as error:  # ends only this request
            log.exception("detokenising %s failed", chunk.rid)
            self.forget(chunk.rid)
            self._abort(chunk.rid)
            failure = RamifyError(f"Detokenising failed: {error}")
            self._fail(Failed(rid=chunk.rid, error=failure.to_info()))
            return None

    def _chunk(self, chunk: TokenChunk) -> TextChunk | None:
        if chunk.first:
            sampling = chunk.sampling
            assert sampling is not None
            skip = sampling.skip_special_tokens
            self._outputs[chunk.rid] = _Output(
                TextStream(
                    lambda ids: self._decode(ids, skip_special_tokens=skip),
                    stop=sampling.stop,
                    stop_after=chunk.stop_after,
                    context=chunk.context,
                    overlap=chunk.overlap,
                    special=self._special,
                ),
                usage=chunk.usage or Usage(),
                every_s=chunk.every_s,
            )
        output = self._outputs.get(chunk.rid)
        if output is None:
            return None  # a stop string has ended it, and the scheduler has not received the abort yet
        return self._continue(output, chunk)

    def _continue(self, output: _Output, chunk: TokenChunk) -> TextChunk | None:
        finish = chunk.finish
        stop_token = finish is not None and isinstance(finish.matched, int)
        ids = chunk.ids[:-1] if stop_token else chunk.ids
        text, matched, behind = output.stream.push(ids)
        if behind:  # of draft tokens that were verified in one step
            ids = ids[:-behind]
            chunk = shortened(chunk, len(ids))
        output.ids += len(chunk.ids)
        if chunk.usage is not None:
            output.usage = chunk.usage
        # With `every_s`, `coalesce` adds it.
        usage = output.usage if chunk.first and not output.every_s else None
        output.shown_ids += len(ids)
        kept_ids, tail = output.shown_ids, ""
        if matched is not None:
            if finish is None:
                self._abort(chunk.rid)
            finish = Finish(reason="stop", matched=matched)
            kept_ids, tail = output.stream.cut()
        elif finish is not None:
            text += output.stream.flush()
        if finish is not None and output.stream.healed:
            kept_ids, tail = 0, output.stream.text  # the first id also spells the end of the prompt
        if finish is not None:
            usage = msgspec.structs.replace(output.usage, completion_tokens=output.ids)
            self.forget(chunk.rid)
        logprobs = self._with_texts(chunk.logprobs)
        if logprobs is not None:
            starts = output.stream.starts(len(ids))
            starts += [len(output.stream.text)] * (len(logprobs.ids) - len(starts))  # a stop token
            logprobs = msgspec.structs.replace(logprobs, offsets=tuple(starts))
        pieces: tuple[tuple[int, int], ...] = ()
        if len(ids) > 1 and not output.stream.may_stop:
            pieces = output.stream.pieces(len(ids), len(chunk.ids), len(text))
        text_chunk = TextChunk(
            rid=chunk.rid,
            text=text,
            ids=chunk.ids,
            forced=chunk.forced,
            pieces=pieces,
            controls=output.stream.controls(),
            logprobs=logprobs,
            prompt_logprobs=self._with_texts(chunk.prompt_logprobs),
            choices=tuple([self._score(score) for score in chunk.choices]),
            decisions=chunk.decisions,
            embedding=chunk.embedding,
            usage=usage,
            finish=finish,
            kept_ids=kept_ids if finish is not None else 0,
            tail=tail,
            replaced=chunk.replaced,
            enforcement=chunk.enforcement,
        )
        return output.coalesce(text_chunk, self._clock()) if output.every_s else text_chunk

    def _score(self, score: ChoiceScore) -> ChoiceScore:
        return msgspec.structs.replace(
            score,
            tokens=self._with_texts(score.tokens),
            unconditional=self._with_texts(score.unconditional),
        )

    def _with_texts(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        if logprobs is None:
            return None
        return msgspec.structs.replace(
            logprobs,
            texts=tuple(self._token_text(token) for token in logprobs.ids),
            top_texts=tuple(tuple(self._token_text(token) for token, _ in top) for top in logprobs.top),
        )

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._spell(token)
        return text

    @cached_property
    def _spell(self) -> Callable[[int], str]:
        """Function from a token id to its text (`token_text`), made from the token's bytes in the vocabulary.
        Decoding a token alone would lose bytes of an unfinished character, and with SentencePiece the space
        before a word."""
        from ramify.grammar.vocabulary import byte_speller

        decoder = self._tokenizer.decoder
        added = self._tokenizer.get_added_tokens_decoder()
        try:
            spell = byte_speller(None if decoder is None else json.loads(decoder.__getstate__()))
        except EngineError:  # a vocabulary of another kind, whose tokens are texts
            return lambda token: self._decode([token], skip_special_tokens=False)

        def spelled(token: int) -> str:
            if token in added:
                return added[token].content
            return token_text(spell(self._tokenizer.id_to_token(token) or ""))

        return spelled


def shortened(chunk: TokenChunk, count: int) -> TokenChunk:
    """`chunk` reduced to its first `count` output tokens."""
    logprobs = chunk.logprobs
    if logprobs is not None:
        lists = {name: getattr(logprobs, name)[:count] for name in logprobs.__struct_fields__}
        logprobs = TokenLogprobs(**lists)
    forced = tuple([place for place in chunk.forced if place < count])
    return msgspec.structs.replace(chunk, ids=chunk.ids[:count], forced=forced, logprobs=logprobs)


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """One chunk in place of consecutive `chunks` of a request, with the finish and the usage of the last."""
    if len(chunks) == 1:
        return chunks[0]
    forced: list[int] = []
    pieces: list[tuple[int, int]] = []
    controls: list[int] = []
    count = characters = 0
    for chunk in chunks:
        forced += [count + index for index in chunk.forced]
        pieces += chunk.pieces or ((len(chunk.ids), len(chunk.text)),)
        controls += [characters + place for place in chunk.controls]
        count += len(chunk.ids)
        characters += len(chunk.text)
    return msgspec.structs.replace(
        chunks[-1],
        text="".join([chunk.text for chunk in chunks]),
        ids=tuple([token for chunk in chunks for token in chunk.ids]),
        forced=tuple(forced),
        pieces=tuple(pieces),
        controls=tuple(controls),
        logprobs=concatenated([chunk.logprobs for chunk in chunks]),
        prompt_logprobs=concatenated([chunk.prompt_logprobs for chunk in chunks]),
        replaced=chunks[0].replaced,
        enforcement=chunks[0].enforcement,
    )


class _Output:
    """An output that has not ended.

    `every_s` is the minimum time between two chunks, in seconds. It is enforced here only for outputs with
    stop strings; for others the scheduler enforces it.
    """

    def __init__(self, stream: TextStream, usage: Usage, every_s: float) -> None:
        self.stream = stream
        self.usage = usage
        self.every_s = every_s
        self.ids = 0
        self.shown_ids = 0  # like `ids`, but without a stop token at the end
        self._held: list[TextChunk] = []
        self._since = 0.0
        self._first = True

    def coalesce(self, chunk: TextChunk, now: float) -> TextChunk | None:
        """The chunks held back so far and `chunk`, joined; None while `every_s` has not passed."""
        self._held.append(chunk)
        if len(self._held) == 1:
            self._since = now
        waited = now - self._since
        if chunk.finish is None and self.stream.may_stop and waited < self.every_s:
            return None
        whole, self._held = joined(self._held), []
        if self._first and whole.usage is None:
            # Tells the client how long ago the first token came.
            usage = msgspec.structs.replace(self.usage, total_s=self.usage.total_s + waited)
            whole = msgspec.structs.replace(whole, usage=usage)
        self._first = False
        return whole


def main() -> None:
    orders = take_orders("detokenizer")
    sockets = Sockets(Path(orders.sockets))
    inbox: Inbox[ToDetokenizer] = Inbox(sockets.detokenizer, ToDetokenizer)
    scheduler, frontend = Outbox(sockets.scheduler), Outbox(sockets.frontend)
    with reporting_start_up("detokenizer", frontend):
        tokenizer = load_backend(Path(orders.tokenizer))
    detokenizer = Detokenizer(
        tokenizer, lambda rid: scheduler.send(Abort(rid=rid, silent=True)), frontend.send
    )
    frontend.send(Ready(role="detokenizer", pid=os.getpid()))
    finish_startup()
    while True:
        message = inbox.recv()
        if isinstance(message, StepOutput):
            text = detokenizer.step(message)
            if text is not None:
                frontend.send(text)
        elif message is not None:
            if isinstance(message, Failed):
                detokenizer.forget(message.rid)
            frontend.send(message)
