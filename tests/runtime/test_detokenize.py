"""Text comes out whole, once, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.runtime.processes.text_stream import REPLACEMENT, TextStream


def decode(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
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
