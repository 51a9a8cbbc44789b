"""Prompts that end inside a token: the tokens that may be replaced, their replacements, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.processes.text_stream import TextStream
from ramify.runtime.scheduler.requests.constrained import MAX_TOKENS, Healer, OpenEnd
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import END_ID, VOCAB

PIECES = [b"ab", b"abc", b"bc", b"bcd", b"cd", b"cda", b" a", b" ab", b"a b", b"://", b"\xc3\xa9a", b"b" * 5]


def vocabulary() -> Vocabulary:
    """The vocabulary of the tiny model, one token for each byte, with `PIECES` in its padding."""
    tokens = [bytes([i]) for i in range(256)] + [b""] * (VOCAB - 256)
    tokens[260 : 260 + len(PIECES)] = PIECES
    return Vocabulary(tuple(tokens), (END_ID,))


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        (b"xa", OpenEnd(1, b"a")),  # ab, abc, "a b"
        (b"xab", OpenEnd(2, b"ab")),  # abc
        (b"xabc", OpenEnd(2, b"bc")),  # bcd; nothing is longer than abc
        (b"x:", OpenEnd(1, b":")),
        (b"xb", OpenEnd(1, b"b")),
        (b"xbbbb", OpenEnd(4, b"bbbb")),
        (b"xx", None),
        (b"x\xc3\xa9", OpenEnd(2, b"\xc3\xa9")),
        (b"x\xc3", None),  # inside a character
        (b"a", None),  # something must stay
        (b"ab", OpenEnd(1, b"b")),
    ],
)
def test_open_ends(prompt: bytes, end: OpenEnd | None) -> None:
    assert Healer(vocabulary()).open_end(list(prompt)) == end


def test_control_tokens_are_never_replaced() -> None:
    assert Healer(vocabulary()).open_end([*b"xa", END_ID]) is None
    assert Healer(vocabulary()).open_end([*b"x", END_ID, *b"a"]) == OpenEnd(1, b"a")


def test_tokens_beginning_with_a_text() -> None:
    healer, tokens = Healer(vocabulary()), vocabulary().tokens
    for text in (b"a", b"ab", b"b", b" ", b"\xc3", b"zz"):
        assert allowed(healer.beginning_with(text)) == {
            token for token, spelling in enumerate(tokens) if spelling.startswith(text)
        }


def expected(oracle: Any, prompt: Sequence[int], count: int) -> tuple[list[int], str, float]:
    """(output ids, overlap, smallest margin of a choice), computed independently of the engine."""
    healer, tokens = Healer(vocabulary()), vocabulary().tokens
    ids = list(prompt)
    output: list[int] = []
    overlap = ""
    margin = float("inf")

    def choose(among: set[int] | None) -> int:
        nonlocal margin
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([ids])).logits[0, -1].double()
        if among is not None:
            mask = torch.full_like(logits, -torch.inf)
            mask[list(among)] = 0.0
            logits = logits + mask
        best = torch.topk(logits, 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        return int(best.indices[0])

    end = healer.open_end(ids[-MAX_TOKENS - 1 :])
    if end is not None:
        proposed, rest = ids[-end.tokens :], end.text
        del ids[-end.tokens :]
        for draft in proposed:
            token = choose({t for t, text in enumerate(tokens) if text.startswith(rest)} | {draft})
            if token != draft:
                overlap = rest.decode()
                output.append(token)
                ids.append(token)
                break
            ids.append(draft)
            rest = rest[len(tokens[draft]) :]
    while len(output) < count:
        output.append(choose(None))
        ids.append(output[-1])
    return output, overlap, margin


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 3, "page_size": 2}, {"prefix_cache": "naive"}])
def test_healed_as_by_hand(tiny_model: Any, tiny_oracle: Any, options: dict[str, Any]) -> None:
    draw = random.Random(5)
    prompts = [[draw.choice(b"abcd :") for _ in range(draw.randint(2, 9))] for _ in range(40)]
    local = LocalScheduler(tiny_model, healer=Healer(vocabulary()), **options)
    rids = [local.submit(prompt, open_end=True, max_tokens=4, ignore_eos=True) for prompt in prompts]
    local.run()
    replaced = 0
    for prompt, rid in zip(prompts, rids, strict=True):
        ids, overlap, margin = expected(tiny_oracle, prompt, 4)
        result = local.results[rid]
        if margin > 1e-4:
            assert (result.ids, result.overlap) == (ids, overlap), bytes(prompt)
        replaced += bool(overlap)
        assert result.usage is not None
        assert result.usage.completion_tokens == 4
    assert 5 < replaced < 40, "both ways were taken"


def test_off_where_it_is_not_wanted(tiny_model: Any) -> None:
    plain = LocalScheduler(tiny_model)
    local = LocalScheduler(tiny_model, healer=Healer(vocabulary()))
    prompt = list(b"xab")
    (want,) = plain.complete([prompt], max_tokens=5, ignore_eos=True)
    for how in (
        {"token_healing": False, "open_end": True},
        {},
        {"open_end": True, "prompt_logprobs_start": 0},
    ):
        rid = local.submit(prompt, max_tokens=5, ignore_eos=True, **how)
        local.run()
        assert local.results[rid].ids == want.ids
        assert local.results[rid].overlap == ""


def test_retracted_while_healing(tiny_model: Any, tiny_oracle: Any) -> None:
    """With few pages, requests are retracted, and heal their prompts again with the same result."""
    prompts = [[*b"abcd" * 6, *end] for end in (b"ab", b"a", b" ", b"bbbb", b":")]
    local = LocalScheduler(tiny_model, healer=Healer(vocabulary()), num_pages=24, page_size=4)
    rids = [local.submit(prompt, open_end=True, max_tokens=24, ignore_eos=True) for prompt in prompts]
    local.run()
    for prompt, rid in zip(prompts, rids, strict=True):
        ids, overlap, margin = expected(tiny_oracle, prompt, 24)
        if margin > 1e-4:
            assert (local.results[rid].ids, local.results[rid].overlap) == (ids, overlap)


def test_the_overlap_is_not_in_the_text() -> None:
    tokens = {1: "://", 2: "ex", 3: "ample"}
    stream = TextStream(lambda ids: "".join(tokens[i] for i in ids), overlap=":", stop=["pl"])
    assert stream.push([1]).text == "//"
    assert stream.healed
    assert stream.push([2, 3]) == ("exam", "pl", 0)
    assert stream.text == "//exam"
