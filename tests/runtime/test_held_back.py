"""Text that nobody watches is sent in fewer chunks, and is the same text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine_messages import Failed, StepOutput, Submit
from ramify.messages import Finish, TextChunk
from ramify.runtime.processes.detokenizer import Detokenizer, joined
from ramify.runtime.processes.text_stream import TextStream
from ramify.runtime.scheduler.outputs import StepOutputs
from ramify.runtime.scheduler.requests.request import Request
from ramify.sampling_params import SamplingParams

EOS = 256
EVERY_S = 0.5


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}


class Steps:
    """One request, stepped from the scheduler's outputs to the frontend's chunks."""

    def __init__(self, every_s: float, stop: Sequence[str] = ()) -> None:
        self.now = 100.0
        sampling = SamplingParams(max_tokens=100, stop=tuple(stop))
        submit = Submit(rid="r", ids=(65, 66), sampling=sampling, every_s=every_s)
        self.request = Request(submit, arrival=self.now - 1, max_tokens=100)
        self.outputs = StepOutputs()
        self.aborted: list[str] = []
        self.failed: list[Failed] = []
        tokenizer: Any = Bytes()
        self.detokenizer = Detokenizer(tokenizer, self.aborted.append, self.failed.append, lambda: self.now)
        self.sent: list[StepOutput] = []
        self.told: list[TextChunk] = []

    @property
    def ended(self) -> bool:
        return bool(self.told) and self.told[-1].finish is not None

    def step(self, tokens: Sequence[int], seconds: float, finish: Finish | None = None) -> None:
        """Run a step that takes `seconds` and outputs `tokens`. All but the first count as forced."""
        self.now += seconds
        if self.request.stats.first_token is None:
            self.request.stats.first_token = self.now
        for place, token in enumerate(tokens):
            self.request.append(token)
            self.outputs.tokens(self.request, [token], None, [0] if place else [])
        if finish is not None:
            self.outputs.finish(self.request, finish)
        output = self.outputs.take_output(self.now)
        if output is None:
            return
        self.sent.append(output)
        text = self.detokenizer.step(output)
        if text is not None:
            self.told += text.chunks


def run(data: bytes, sizes: Sequence[int], seconds: float, every_s: float, stop: Sequence[str] = ()) -> Steps:
    """Run `data` in steps of these sizes, then of one token, and end with a stop token."""
    steps = Steps(every_s, stop)
    position = 0
    for size in [*sizes, *([1] * len(data))]:
        if position >= len(data) or steps.ended:
            break
        steps.step(data[position : position + size], seconds)
        position += size
    if not steps.ended:
        steps.step([EOS], seconds, Finish(reason="stop", matched=EOS))
    return steps


def pieces(chunks: Sequence[TextChunk]) -> list[tuple[int, int]]:
    return [piece for chunk in chunks for piece in chunk.pieces or ((len(chunk.ids), len(chunk.text)),)]


@given(st.text(alphabet="abcé", max_size=20), st.lists(st.integers(2, 6), max_size=10))
def test_tokens_behind_a_stop_string_are_no_output(text: str, sizes: list[int]) -> None:
    """A step that verifies draft tokens may output tokens after the end of a stop string."""
    one, several = (joined(run(text.encode(), each, 0.1, 0.0, ("bc", "é")).told) for each in ([], sizes))
    for name in ("text", "ids", "kept_ids", "tail", "finish"):
        assert getattr(several, name) == getattr(one, name), name
    assert several.usage is not None
    assert one.usage is not None
    assert several.usage.completion_tokens == one.usage.completion_tokens


@given(
    st.text(max_size=20),
    st.lists(st.integers(1, 4), max_size=10),
    st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    st.sampled_from([(), ("a",), ("é", "bc")]),
)
def test_the_same_comes_in_fewer_chunks(
    text: str, sizes: list[int], seconds: float, stop: tuple[str, ...]
) -> None:
    data = text.encode()
    each, held = run(data, sizes, seconds, 0.0, stop), run(data, sizes, seconds, EVERY_S, stop)
    one, other = joined(each.told), joined(held.told)
    for name in ("text", "ids", "forced", "kept_ids", "tail", "finish"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.usage is not None
    assert other.usage is not None
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert held.aborted == each.aborted
    assert len(held.told) <= len(each.told)
    # The ids and characters of every piece go together, whoever made it.
    assert sum(ids for ids, _ in pieces(held.told)) == len(other.ids)
    assert sum(characters for _, characters in pieces(held.told)) == len(other.text)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_each_token_of_what_is_told_together_keeps_its_own_text(stop: tuple[str, ...]) -> None:
    held = run("héllo".encode(), [], 0.01, EVERY_S, stop)
    (chunk,) = held.told
    assert chunk.text == "héllo"
    if stop:  # inside a character there is nothing to tell yet
        assert chunk.pieces == ((1, 1), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0))
        assert len(held.sent) == 7
    else:
        assert chunk.pieces == ((1, 1), (2, 1), (1, 1), (1, 1), (1, 1), (1, 0))
        assert len(held.sent) == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_long_text_is_told_now_and_then_and_says_when_it_began(stop: tuple[str, ...]) -> None:
    steps = Steps(EVERY_S, stop)
    for token in b"abcdefghijkl":
        steps.step([token], 0.125)
    assert [chunk.text for chunk in steps.told] == ["abcde", "fghij"]
    first, second = steps.told
    assert first.usage is not None
    assert first.usage.decode_s == pytest.approx(0.5)
    assert second.usage is None


def test_what_is_held_back_of_one_does_not_hold_back_others() -> None:
    steps = Steps(EVERY_S)
    submit = Submit(rid="s", ids=(67,), sampling=SamplingParams(max_tokens=9))
    other = Request(submit, arrival=0.0, max_tokens=9)
    steps.outputs.tokens(other, [68], None, [])
    steps.step([69], 0.01)
    assert [chunk.rid for chunk in steps.sent[0].chunks] == ["s"]
    steps.outputs.drop(steps.request)
    assert steps.outputs.take_output(steps.now + 10) is None


def test_an_error_in_a_tokenizer_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(0.0)
    steps.step([67], 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        steps.step([68], 0.1)
    assert steps.aborted == ["r"]
    assert [failed.rid for failed in steps.failed] == ["r"]
    told = len(steps.told)
    steps.step([69], 0.1)  # sent before the scheduler has received the abort
    assert len(steps.told) == told
