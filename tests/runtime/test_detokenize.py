"""Detokenised text is whole, is sent once, and never goes past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ramify.engine_messages import StepOutput, TokenChunk
from ramify.messages import Finish, TokenLogprobs
from ramify.runtime.processes.detokenizer import Detokenizer
from ramify.runtime.processes.text_stream import REPLACEMENT, TextStream
from ramify.sampling_params import SamplingParams
from ramify.text import token_bytes, token_text


def decode(ids: Sequence[int]) -> str:
    """Decode tokens that are bytes."""
    return bytes(ids).decode("utf-8", "replace")


def feed(
    data: bytes, sizes: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], str | None, TextStream]:
    stream = TextStream(decode, stop=stop)
    pieces: list[str] = []
    position = 0
    for size in [*sizes, *([1] * len(data))]:
        if position >= len(data):
            break
        text, matched, _ = stream.push(list(data[position : position + size]))
        pieces.append(text)
        position += size
        if matched is not None:
            return pieces, matched, stream
    pieces.append(stream.flush())
    return pieces, None, stream


SIZES = st.lists(st.integers(1, 4), max_size=20)


@given(st.text(max_size=30), SIZES)
def test_all_text_comes_out_once_and_whole(text: str, sizes: list[int]) -> None:
    pieces, _, _ = feed(text.encode(), sizes)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.binary(max_size=30), SIZES)
def test_invalid_bytes_end_in_some_text(data: bytes, sizes: list[int]) -> None:
    pieces, _, _ = feed(data, sizes)
    assert "".join(pieces).replace(REPLACEMENT, "") == data.decode("utf-8", "replace").replace(
        REPLACEMENT, ""
    )


@given(
    st.text(alphabet="abc€", max_size=40),
    SIZES,
    st.lists(st.text(alphabet="abc€", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(text: str, sizes: list[int], stop: list[str]) -> None:
    pieces, matched, stream = feed(text.encode(), sizes, stop)
    visible = "".join(pieces)
    one_by_one, first, alone = feed(text.encode(), [], stop)
    assert ("".join(one_by_one), first, alone.cut()) == (visible, matched, stream.cut()), (
        "sizes change nothing"
    )
    if matched is None:
        assert not any(candidate in text for candidate in stop)
        assert visible == text
    else:
        assert matched in stop
        assert text.startswith(visible + matched)
        kept, tail = stream.cut()
        assert decode(text.encode()[:kept]) + tail == visible
        assert REPLACEMENT not in decode(text.encode()[:kept])


def test_nothing_of_a_stop_string_is_released_early() -> None:
    stream = TextStream(decode, stop=["END."])
    shown = "".join(stream.push([byte]).text for byte in b"all EN")
    assert shown == "all "
    assert stream.push(list(b"D!")).text == "END!"


@pytest.mark.parametrize("context", [[], list(b"prompt")])
def test_context_is_not_output(context: list[int]) -> None:
    stream = TextStream(decode, context=context)
    assert stream.push(list("é".encode()[:1])).text == ""
    assert stream.push(list("é".encode()[1:])).text == "é"


@given(SIZES)
def test_stop_strings_count_behind_the_thoughts(sizes: list[int]) -> None:
    text = "a\n</x b\n</x>..\n..c\nd"
    stream = TextStream(decode, stop=["\nd", "\n"], stop_after=["</x>", ".."])
    shown, matched, position = "", None, 0
    for size in [*sizes, *[1] * len(text)]:
        released = stream.push(list(text.encode()[position : position + size]))
        shown, matched, position = shown + released.text, released.matched, position + size
        if matched is not None:
            break
    assert (shown, matched) == ("a\n</x b\n</x>..", "\n")


@given(st.text(alphabet="a€😀é", max_size=12), SIZES)
def test_a_token_starts_at_the_first_character_that_it_is_a_part_of(text: str, sizes: list[int]) -> None:
    _, _, stream = feed(text.encode(), sizes)
    expected = [i for i, character in enumerate(text) for _ in character.encode()]
    assert stream.starts(len(expected)) == expected


def test_a_token_with_the_end_of_one_character_and_the_begin_of_another() -> None:
    tokens = ["é😀".encode()[:1], "é😀".encode()[1:4], "é😀".encode()[4:], b"xy"]
    stream = TextStream(lambda ids: b"".join(tokens[i] for i in ids).decode("utf-8", "replace"), stop=["y"])
    assert stream.push([0, 1, 2, 3]).matched == "y"
    assert stream.starts(4) == [0, 0, 1, 2]


def piece(text: str, decoder: Any) -> Tokenizer:
    """A tokenizer whose vocabulary is the words of `text`, spelled for `decoder`."""
    vocabulary = {entry: i for i, entry in enumerate(text.split(" "))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text", "texts", "places"),
    [
        # "é" and "日" in GPT-2's alphabet are Ã © and æ Ĺ ¥; the second token has the end of one and another.
        (
            piece("Ġa Ã ©æ Ĺ¥", decoders.ByteLevel()),
            " aé日<|end|>",
            [" a", r"bytes:\xc3", r"bytes:\xa9\xe6", r"bytes:\x97\xa5", "<|end|>"],
            [0, 2, 2, 3, 4],
        ),
        (
            piece(
                "▁a <0xC3> <0xA9> ▁b",
                decoders.Sequence(
                    [
                        decoders.Replace("▁", " "),
                        decoders.ByteFallback(),
                        decoders.Fuse(),
                        decoders.Strip(" ", 1, 0),
                    ]
                ),
            ),
            "aé b<|end|>",
            [" a", r"bytes:\xc3", r"bytes:\xa9", " b", "<|end|>"],
            [0, 1, 1, 2, 4],
        ),
        (piece("ab ##cd", decoders.WordPiece()), "abcd <|end|>", ["ab", "##cd", "<|end|>"], [0, 2, 4]),
    ],
)
def test_the_tokens_of_log_probabilities_have_their_true_bytes(
    tokenizer: Tokenizer, text: str, texts: list[str], places: list[int]
) -> None:
    failed: list[Any] = []
    detokenizer = Detokenizer(tokenizer, failed.append, failed.append)
    ids = tuple(range(len(texts)))
    chunk = TokenChunk(
        rid="r",
        ids=ids,
        first=True,
        sampling=SamplingParams(skip_special_tokens=False),
        logprobs=TokenLogprobs(ids=ids, logprobs=(-1.0,) * len(ids), top=tuple(((i, -1.0),) for i in ids)),
        finish=Finish(reason="stop"),
    )
    output = detokenizer.step(StepOutput(chunks=(chunk,)))
    assert failed == []
    assert output is not None
    (found,) = output.chunks
    assert found.text == text
    assert found.logprobs is not None
    assert list(found.logprobs.texts) == texts
    assert [top for (top,) in found.logprobs.top_texts] == texts
    assert list(found.logprobs.offsets) == places
    assert all(token_text(token_bytes(token)) == token for token in texts)
