"""Vocabularies, all that grammar engines need of a tokenizer: the bytes of every token, the stop tokens."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import msgspec

from ramify.constraint import CONTROLS, with_controls
from ramify.errors import EngineError


class Vocabulary(msgspec.Struct, frozen=True, eq=False, dict=True, weakref=True):
    """Token bytes by id.

    `tokens[t]` is empty for control tokens, for stop tokens, and for the padding between the tokenizer's
    vocabulary and the width of the model's logits. Masks allow a stop token only where a text is complete, a
    control token only in place of its stand-in (`controls`) or as the end of a preamble, and padding never.
    """

    tokens: tuple[bytes, ...]
    """Bytes of each token, one entry per logit."""
    stop_ids: tuple[int, ...]
    controls: tuple[tuple[int, bytes], ...] = ()
    """Control tokens that a grammar can contain, each with its stand-in (`constraint.with_controls`)."""

    @property
    def size(self) -> int:
        """Width of the logits and of the masks."""
        return len(self.tokens)

    @cached_property
    def spelled_bytes(self) -> frozenset[int]:
        """The bytes that occur in some token. Text with any other byte cannot be generated."""
        return frozenset().union(*self.tokens)

    @cached_property
    def spelled(self) -> list[tuple[bytes, int]]:
        """Pairs of spelling and token, sorted."""
        return sorted((text, token) for token, text in enumerate(self.tokens) if text)

    def text_of(self, token: int) -> bytes:
        """The bytes of `token` in a constrained text: of a control token its stand-in. Empty if the token
        occurs in no such text."""
        return dict(self.controls).get(token) or self.tokens[token]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Vocabulary:
        return msgspec.msgpack.decode(data, type=Vocabulary)


def tokens_beginning_with(
    data: bytes, vocabulary: Vocabulary, *, whole: bool = False
) -> Iterator[tuple[bytes, int]]:
    """The tokens that begin with `data` and are longer, each as its remaining bytes and its id. With `whole`,
    the tokens that spell just `data` come first."""
    order = vocabulary.spelled
    for i in range(bisect.bisect_left(order, (data, -1 if whole else vocabulary.size)), len(order)):
        text, token = order[i]
        if not text.startswith(data):
            return
        yield text[len(data) :], token


def from_tokenizer(tokenizer: Any, *, vocab_size: int, stop_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of a fast `transformers` tokenizer, or of a `tokenizers.Tokenizer`.

    `vocab_size` is the width of the logits. Raises `EngineError` unless the tokenizer spells bytes as
    byte-level BPE (GPT-2) or byte fallback (SentencePiece) does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    description = json.loads(backend.to_str())
    added = {entry["id"]: entry for entry in description["added_tokens"]}
    spell = byte_speller(description["decoder"])
    tokens = [b""] * vocab_size
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token >= vocab_size:
            continue
        if token not in added:
            tokens[token] = spell(text)
        elif not added[token]["special"]:
            tokens[token] = added[token]["content"].encode()
    stops = tuple(sorted({token for token in stop_ids if 0 <= token < vocab_size}))
    for token in stops:
        tokens[token] = b""
    controls = [
        (token, with_controls(entry["content"]).encode())
        for token, entry in sorted(added.items())
        if entry["content"] in CONTROLS and entry["special"] and token < vocab_size and token not in stops
    ]
    return Vocabulary(tuple(tokens), stops, tuple(controls))


def byte_speller(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """The function that spells an entry of the vocabulary as bytes. `decoder` is the value of "decoder" in
    tokenizer.json. Raises `EngineError` unless entries spell bytes as byte-level BPE (GPT-2) or byte fallback
    (SentencePiece) does."""
    decoder = decoder or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds:
        return _byte_fallback
    raise EngineError(
        f"Constraints need a tokenizer whose tokens are bytes; this one has {sorted(map(str, kinds))}.",
        remedy="Use a model with a byte-level or byte-fallback BPE tokenizer.",
    )


def _byte_alphabet() -> dict[str, int]:
    # Byte-level BPE writes printable bytes as themselves and shifts the others to 256 and up
    # (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", its bytes_to_unicode).
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:  # an added token that is not in the alphabet stands for its own text
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    if piece := _BYTE_PIECE.fullmatch(text):
        return bytes([int(piece[1], 16)])
    return text.replace("▁", " ").encode()
